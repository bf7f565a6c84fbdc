"""The studies' additions to the configuration groups, found if this folder is next to `lit_dpret`."""
