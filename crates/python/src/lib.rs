//! The extension module `mooncake._native`: convert, leave the interpreter, call, convert back.
//!
//! In reading order: [`store`] (a handle on a pool), [`pending`] and [`workers`] (its calls for
//! event loops), [`engine`] (a transfer engine alone),
//! [`options`], [`argument`] and [`buffer`] (what Python hands over), [`error`] (what it is told),
//! [`detach`] (leaving the interpreter and coming back), [`runtime`], [`log`],
//! [`hostmem`] (an allocator for others), [`process`] (exit,
//! and the master as a program).
#![deny(unsafe_code)]

mod argument;
mod buffer;
mod detach;
mod engine;
mod error;
mod hostmem;
mod log;
mod options;
mod pending;
mod process;
mod rpc;
mod runtime;
mod store;
mod workers;

/// What `mooncake` is made of.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::{
        buffer::{Buffer, writable_range},
        engine::{Engine, read_memory, write_memory},
        error::{codes, failure, last_error, use_exceptions},
        hostmem::host_allocator,
        log::{log_to_queue, take_log_records},
        options::PutOptions,
        pending::Pending,
        process::{
            at_exit, environment, local_topology, rdma_devices, run_daemon, run_master,
            run_topology_dump, run_transfer_bench, secret_variables, unsupported_variables,
        },
        rpc::{RpcClient, RpcDelivery, RpcServer},
        store::{
            Store,
            status_codes::{
                get_columns, get_one, get_values, is_present, put_columns, put_one, put_values,
            },
        },
    };

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
