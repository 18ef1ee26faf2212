//! The error codes of the upstream transfer engine. They differ from those of the store: several
//! numbers mean something else there.

/// One row of the table of engine error codes.
#[derive(Debug, Clone, Copy)]
pub struct EngineCodeRow {
    /// The value that a call of the engine returns.
    pub number: i32,
    /// The upstream name.
    pub name: &'static str,
    /// The calls that return the code, the usual cause, and the remedy.
    pub remedy: &'static str,
}

const fn row(number: i32, name: &'static str, remedy: &'static str) -> EngineCodeRow {
    EngineCodeRow { number, name, remedy }
}

/// Every negative code of the engine.
pub const ENGINE_CODES: &[EngineCodeRow] = &[
    row(
        -1,
        "ERR_INVALID_ARGUMENT",
        "The call failed, or its arguments are wrong: an engine that is not initialized, lists of \
         different lengths, an empty or unmapped range, a peer that is gone, or a range that the peer \
         did not register. `mooncake.last_error()` names the cause; check the peer's name and its \
         registered ranges.",
    ),
    row(
        -2,
        "ERR_TOO_MANY_REQUESTS",
        "From `transfer_check_status`: the transfer did not end in time; the peer may be overloaded \
         or stopped, so check again later or raise MC_TRANSFER_TIMEOUT. No other call returns this \
         code.",
    ),
    row(
        -3,
        "ERR_ADDRESS_NOT_REGISTERED",
        "From `unregister_memory` and `batch_unregister_memory`: no registered range begins \
         there; pass the exact address that was registered, and unregister it once.",
    ),
    row(
        -4,
        "ERR_BATCH_BUSY",
        "A batch was released while it was in flight; wait until it completes.",
    ),
    row(-6, "ERR_DEVICE_NOT_FOUND", "There is no such network device; leave its name empty."),
    row(
        -7,
        "ERR_ADDRESS_OVERLAPPED",
        "From `register_memory` and `batch_register_memory`: the range overlaps one that is \
         registered; use that range, or unregister it first.",
    ),
    row(
        -101,
        "ERR_DNS",
        "The name of the peer does not resolve; check the name, or use the address.",
    ),
    row(
        -102,
        "ERR_SOCKET",
        "From `send_probe`: no peer answers at that name; check that the peer runs and that its port \
         can be reached.",
    ),
    row(
        -103,
        "ERR_MALFORMED_JSON",
        "A peer or the metadata server sent JSON that is not a segment descriptor; check its version, \
         and that the address belongs to a metadata server.",
    ),
    row(
        -104,
        "ERR_REJECT_HANDSHAKE",
        "The peer refused the handshake; both sides need the same protocol, and the same token if one \
         is set.",
    ),
    row(
        -200,
        "ERR_METADATA",
        "From `send_probe`: the metadata server does not know that name; check the name that the \
         peer gave to `initialize`, and that both use the same server.",
    ),
    row(-201, "ERR_ENDPOINT", "A connection to the peer could not be made; check that it runs."),
    row(
        -202,
        "ERR_CONTEXT",
        "A network device could not be used; check its state and permissions.",
    ),
    row(-300, "ERR_NUMA", "The memory could not be bound to its NUMA node; check the location."),
    row(-301, "ERR_CLOCK", "The system clock could not be read."),
    row(-302, "ERR_MEMORY", "Out of memory; use a smaller range, or free memory."),
    row(-303, "ERR_NOT_IMPLEMENTED", "This build does not support the call; do not use it."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_ordered_and_have_remedies() {
        assert!(ENGINE_CODES.is_sorted_by(|a, b| a.number > b.number));
        for row in ENGINE_CODES {
            assert!(row.number < 0 && row.name.starts_with("ERR_"), "{row:?}");
            assert!(row.remedy.ends_with('.'), "{row:?}");
        }
    }
}
