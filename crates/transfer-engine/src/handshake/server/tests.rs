//! Loopback tests of the handshake socket.
