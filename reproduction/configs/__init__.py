"""What the studies add to the configuration groups; found where this folder stands beside `lit_dpret`."""
