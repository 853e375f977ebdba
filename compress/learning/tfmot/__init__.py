"""tensorflow-model-optimization (tfmot) and tf-keras: sparsity, clustering and QAT."""
