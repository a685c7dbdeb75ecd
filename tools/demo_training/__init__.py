"""Parts of `tools/train_demo_model.py`."""
