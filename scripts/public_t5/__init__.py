"""The parts of `scripts/train_public_t5.py`: sources, tasks, tokenizer, training, measuring, export."""
