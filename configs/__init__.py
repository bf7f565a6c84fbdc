"""The configuration groups; a package, so that `pkg://lit_dpret.configs` finds them in a wheel."""
