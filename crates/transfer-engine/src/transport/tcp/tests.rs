//! Loopback tests of both protocols.
