"""Train, synthesize, evaluate: `python train.py model=generator privacy.eps=3`."""

from lit_dpret.__main__ import main

if __name__ == "__main__":
    main()
