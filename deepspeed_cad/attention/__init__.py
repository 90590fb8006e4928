"""What runs in a layer: dispatch, serve and return as autograd functions; micro-batches carry the plans there."""
