"""The model card, the upload of a trained model to the Hub, and a Space that serves the demo."""
