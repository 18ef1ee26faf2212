//! The store client.
