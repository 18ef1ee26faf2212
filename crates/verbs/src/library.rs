//! libibverbs, loaded by name at run time, and its function table.
//!
//! The table has only exported functions. Functions that the C headers define inline (posting,
//! polling) go through function pointers that the driver put into the context.

use std::{fmt, sync::Arc};

use libc::{c_char, c_int, c_void};
use libloading::os::unix::{Library as SharedObject, RTLD_LOCAL, RTLD_NOW};
use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_port_attr,
};

use crate::{Device, Error, Result};

/// File name in every distribution.
const FILE_NAME: &str = "libibverbs.so.1";

/// Declares the table and loads each function by its name.
macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The ibverbs functions in use.
        pub(crate) struct Functions {
            $($(#[$doc])* pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(object: &SharedObject) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the one of infiniband/verbs.h, and libibverbs keeps
                        // the signatures of its exported functions within a soname. The pointer
                        // stays valid because `Library` keeps the shared object loaded.
                        let found = unsafe { object.get(stringify!($name).as_bytes()) };
                        *found.map_err(|source| Error::NoFunction {
                            name: stringify!($name),
                            reason: source.to_string(),
                        })?
                    },)*
                })
            }
        }
    };
}

// A macro because a function must become both a typed field and a name to look up, once.
functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: fn(*mut *mut ibv_device);
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_get_device_guid: fn(*mut ibv_device) -> u64;
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: fn(*mut ibv_context) -> c_int;
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    /// Fills only the fields that existed in 2006; the caller clears the rest first.
    ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    ibv_query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_cq:
        fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
}

/// The loaded libibverbs. Every object made through it keeps it loaded.
pub struct Library {
    pub(crate) functions: Functions,
    _object: SharedObject,
}

impl Library {
    /// Loads the library and resolves its functions.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] where rdma-core is not installed.
    pub fn load() -> Result<Arc<Self>> {
        // SAFETY: loading runs the initialisers of libibverbs, which only set up its own state and
        // have no requirement on the caller.
        let object = unsafe { SharedObject::open(Some(FILE_NAME), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|source| Error::NoLibrary { reason: source.to_string() })?;
        let functions = Functions::find(&object)?;
        Ok(Arc::new(Self { functions, _object: object }))
    }

    /// Returns the RDMA devices of this machine, in the library's order; empty if there are none.
    ///
    /// # Errors
    /// The kernel refused. A kernel without RDMA is no error and has no devices.
    pub fn devices(self: &Arc<Self>) -> Result<Vec<Device>> {
        Device::list(self)
    }

    /// Returns the names of [`Self::devices`].
    ///
    /// # Errors
    /// Same as [`Self::devices`].
    pub fn device_names(self: &Arc<Self>) -> Result<Vec<String>> {
        Ok(self.devices()?.iter().map(|device| device.name().to_owned()).collect())
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("file", &FILE_NAME).finish_non_exhaustive()
    }
}
