//! The established numbers of the transfer engine, which are not those of the store: several of them
//! stand for something else there.

/// One row of the table of the engine's numbers.
#[derive(Debug, Clone, Copy)]
pub struct EngineCodeRow {
    /// What a call of the engine returns.
    pub number: i32,
    /// Its established name.
    pub name: &'static str,
    /// Which calls return it, and what usually brings it about and helps.
    pub remedy: &'static str,
}

const fn row(number: i32, name: &'static str, remedy: &'static str) -> EngineCodeRow {
    EngineCodeRow { number, name, remedy }
}

/// Every number of the engine below 0.
pub const ENGINE_CODES: &[EngineCodeRow] = &[
    row(
        -1,
        "ERR_INVALID_ARGUMENT",
        "The call failed, or its arguments are wrong: an engine that is not initialized, lists of \
         different lengths, an empty or unmapped range, a peer that is gone, or a range that it did \
         not register. `mooncake.last_error()` says which; check the peer's name and its registered \
         ranges.",
    ),
    row(
        -2,
        "ERR_TOO_MANY_REQUESTS",
        "From `transfer_check_status`: the transfer did not end in time; the peer may be overloaded \
         or stopped, so ask again later or allow more with MC_TRANSFER_TIMEOUT. No other call of \
         ours returns it.",
    ),
    row(
        -3,
        "ERR_ADDRESS_NOT_REGISTERED",
        "From `unregister_memory` and `batch_unregister_memory`: no registered range begins there; \
         give the very address that was registered, and withdraw it once.",
    ),
    row(-4, "ERR_BATCH_BUSY", "A batch was given up while it ran; wait for its end first."),
    row(-6, "ERR_DEVICE_NOT_FOUND", "There is no such network device; leave its name empty."),
    row(
        -7,
        "ERR_ADDRESS_OVERLAPPED",
        "From `register_memory` and `batch_register_memory`: the range overlaps one that is \
         registered; use that one, or withdraw it first.",
    ),
    row(-101, "ERR_DNS", "The name of the peer has no address; check it, or use the address."),
    row(
        -102,
        "ERR_SOCKET",
        "From `send_probe`: nobody answers at that name; check that the peer runs and that its port \
         can be reached.",
    ),
    row(
        -103,
        "ERR_MALFORMED_JSON",
        "A peer or the metadata server told something that is no description of a segment; check \
         its version, and that the address is that of a metadata server.",
    ),
    row(
        -104,
        "ERR_REJECT_HANDSHAKE",
        "The peer refused; both sides need the same protocol, and the same token if there is one.",
    ),
    row(
        -200,
        "ERR_METADATA",
        "From `send_probe`: the metadata server does not know that name; check the name that the \
         peer gave to `initialize`, and that both use the same server.",
    ),
    row(-201, "ERR_ENDPOINT", "A connection to the peer could not be made; check that it runs."),
    row(-202, "ERR_CONTEXT", "A network device could not be used; check its state and its rights."),
    row(-300, "ERR_NUMA", "The memory could not be bound to its node; check the location."),
    row(-301, "ERR_CLOCK", "The clock of the system could not be read."),
    row(-302, "ERR_MEMORY", "There is no memory; use a smaller range, or free some."),
    row(-303, "ERR_NOT_IMPLEMENTED", "This build cannot do that; leave the call out."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_once_in_order_and_say_what_helps() {
        assert!(ENGINE_CODES.is_sorted_by(|a, b| a.number > b.number));
        for row in ENGINE_CODES {
            assert!(row.number < 0 && row.name.starts_with("ERR_"), "{row:?}");
            assert!(row.remedy.ends_with('.'), "{row:?}");
        }
    }
}
