"""What train.py is made of: from the command line (`recipe`) to the finished model (`run_folder`), a file for each job."""
