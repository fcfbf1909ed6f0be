"""The model card, and the upload of a trained model to the Hub."""
