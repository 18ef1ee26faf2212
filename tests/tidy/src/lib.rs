//! The shape of the tree, as tests.
