"""`python -m lit_dpret` is `lit-dpret`."""

from lit_dpret.cli import main

if __name__ == "__main__":
    main()
