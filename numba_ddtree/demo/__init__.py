"""A small language model with MLA and its block-diffusion drafter, decoded with draft trees."""
