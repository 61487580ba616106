"""Cases of training that run alike on one device and on the ranks of a job."""
