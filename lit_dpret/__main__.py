"""The entry point of `python -m lit_dpret`, `lit-dpret` and `train.py`."""

import sys

from lit_dpret.distributed import rank_watch


def main() -> None:
    """Load the program and run it; report Ctrl-C during loading in the same way as later."""
    try:
        from lit_dpret import cli
    except KeyboardInterrupt:
        if rank_watch.is_started_by_launcher():  # the first process reports it
            raise SystemExit(0) from None
        sys.stderr.write("error: interrupted. Nothing has started yet: run the same command again.\n")
        raise SystemExit(130) from None
    cli.main()


if __name__ == "__main__":
    main()
