"""The parts of train.py, from the command line (`recipe`) to the finished model (`run_folder`)."""
