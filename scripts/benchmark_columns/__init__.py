"""What pages say of the results of benchmarks: columns of tables and sentences, by subject."""
