//! The extension module `mooncake._native`: converts arguments, releases the GIL, calls Rust,
//! converts results.
//!
//! | File | Content |
//! |---|---|
//! | [`store`], `store/calls.rs` | `Store`, a handle on a pool, whose calls block |
//! | [`pending`], [`workers`] | `Pending`, the calls of an event loop, made by a bounded pool of threads |
//! | [`verbs`] | the calls of both, a file for each subject |
//! | `store/open.rs`, `store/settings.rs`, `store/pool.rs` | an open store; its settings; the memory pool of a dummy client |
//! | `store/outcome.rs` | arguments and outcomes of calls |
//! | `store/transfer.rs`, `store/located.rs` | puts and gets; several reads of one version |
//! | `store/parts.rs`, `store/grids.rs` | parts of many objects; ranges at regular distances |
//! | `store/status_codes.rs` | batches of upstream's calls, which answer with codes |
//! | `store/details.rs`, `store/describe.rs`, `store/tasks.rs`, `store/advice.rs` | an object, the pool and tasks as dictionaries; warnings about puts |
//! | [`engine`] | a transfer engine without a pool |
//! | [`rpc`] | messages between processes |
//! | [`collective`] | this process's part in process groups; a group (`group.rs`), the end of an operation (`completion.rs`) |
//! | [`options`], [`argument`], [`caller_memory`] | values from Python: options of puts, arguments, memory |
//! | [`buffer`] | memory that Python gets |
//! | [`error`] | exceptions for Python |
//! | [`detach`], [`runtime`] | releasing and reacquiring the interpreter; the tokio runtime |
//! | [`log`], [`process`] | the log; exit, environment, and the programs of the wheel |
//! | [`hostmem`], [`fast_copy`], [`checksum`], [`key_map`] | an allocator for other libraries; many arrays into one memory; checksums; a dictionary of millions of keys |
//! | [`address`] | the address of a master, as a store reads it |
//! | [`rdma`], [`disk`] | the RDMA devices of this machine; directories of records |
#![deny(unsafe_code)]

mod address;
mod argument;
mod buffer;
mod caller_memory;
mod checksum;
mod collective;
mod detach;
mod disk;
mod engine;
mod error;
mod fast_copy;
mod hostmem;
mod key_map;
mod log;
mod options;
mod pending;
mod process;
mod rdma;
mod rpc;
mod runtime;
mod store;
mod verbs;
mod workers;

/// The classes and functions that the package `mooncake` is built on.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::{
        address::master_address,
        buffer::Buffer,
        caller_memory::{
            AddressRange, ObjectItemsError, holds_objects, readable_range, writable_range,
        },
        checksum::xxh3,
        collective::{CollectiveContext, completion::CollectiveCompletion, group::CollectiveGroup},
        disk::{disk_measure, disk_records, disk_verify, disk_wipe, unmount_disks},
        engine::{Engine, read_memory, write_memory},
        error::{codes, failure, last_error, use_exceptions},
        fast_copy::concat_arrays_into,
        hostmem::host_allocator,
        key_map::KeyMap,
        log::{log_to_queue, take_log_records},
        options::PutOptions,
        pending::Pending,
        process::{
            at_exit, cgroup_memory, environment, invalid_variables, local_topology, port_holder,
            run_daemon, run_master, run_topology_dump, run_transfer_bench, secret_variables,
            unsupported_variables,
        },
        rdma::{RdmaDevice, rdma_devices},
        rpc::{RpcClient, RpcDelivery, RpcServer},
        store::{
            Store,
            grids::read_grids,
            located::Located,
            outcome::AbsentSuffixes,
            status_codes::{
                get_columns, get_one, get_values, is_present, put_columns, put_one, put_values,
            },
        },
    };

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
