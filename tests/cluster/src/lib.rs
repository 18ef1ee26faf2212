//! Real processes on loopback: what the tests of this crate share.
