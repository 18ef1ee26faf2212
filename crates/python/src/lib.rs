//! The extension module `mooncake._native`: converts arguments, releases the GIL, calls Rust,
//! converts results.
//!
//! In reading order: [`store`] (a handle on a pool), [`pending`] and [`workers`] (its calls for
//! event loops), [`engine`] (a transfer engine without a pool), [`rpc`] (messages between
//! processes), [`collective`] (operations of process groups), [`options`], [`argument`] and
//! [`buffer`] (values from Python), [`error`] (exceptions for Python), [`detach`] (releasing and
//! reacquiring the interpreter), [`runtime`], [`log`], [`hostmem`] (an allocator for other
//! libraries), [`fast_copy`] (many arrays into one memory), [`key_map`] (a dictionary of millions of
//! keys), [`rdma`] (the devices of this machine), [`disk`] (directories of records), [`process`]
//! (exit, environment, and the programs of the wheel).
#![deny(unsafe_code)]

mod argument;
mod buffer;
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
mod workers;

/// The classes and functions that the package `mooncake` is built on.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::{
        buffer::{
            AddressRange, Buffer, ObjectItemsError, holds_objects, readable_range, writable_range,
        },
        checksum::xxh3,
        collective::{CollectiveCompletion, CollectiveContext, CollectiveGroup},
        disk::{disk_records, disk_verify, disk_wipe, unmount_disks},
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
