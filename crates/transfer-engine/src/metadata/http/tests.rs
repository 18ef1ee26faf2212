//! The HTTP store against a small server in the test.
