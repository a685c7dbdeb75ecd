"""What tools/scale_model.py predicts with: measured costs, closed forms and a simulation."""
