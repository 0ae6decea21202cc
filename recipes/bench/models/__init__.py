"""Whole models: BERT, GPT and T5 of the evaluation, and stock transformers models."""
