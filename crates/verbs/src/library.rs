//! libibverbs at run time: the functions that this crate uses, found by name.
//!
//! Functions that the headers define inline (posting, polling) go through function pointers that the
//! driver put into the context.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use libc::{c_char, c_int, c_uint, c_void};
use libloading::os::unix::{Library as SharedObject, RTLD_LOCAL, RTLD_NOW};
use rdma_sys::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid,
    ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

use crate::{Device, Error, Result};

/// File name in every distribution.
const FILE_NAME: &str = "libibverbs.so.1";

/// `IBV_FORK_UNNEEDED`: the kernel copies registered pages for a child.
const COPIED_ON_FORK: c_int = 2;

/// Declares the table and loads each function by its name.
macro_rules! functions {
    (
        required: {
            $($(#[$doc:meta])* $name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*
        }
        optional: {
            $($(#[$newer_doc:meta])* $newer:ident: fn($($newer_argument:ty),*) $(-> $newer_result:ty)?;)*
        }
    ) => {
        /// The ibverbs functions in use.
        pub(crate) struct Functions {
            $($(#[$doc])* pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $($(#[$newer_doc])* pub(crate) $newer:
                Option<unsafe extern "C" fn($($newer_argument),*) $(-> $newer_result)?>,)*
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
                    $($newer: {
                        // SAFETY: as above; an older library lacks the function.
                        let found = unsafe { object.get(stringify!($newer).as_bytes()) };
                        found.ok().map(|function| *function)
                    },)*
                })
            }
        }
    };
}

// A macro because a function must become both a typed field and a name to look up, once.
functions! {
    required: {
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
        ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event: fn(*mut ibv_async_event);
        ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq:
            fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut ibv_cq, c_uint);
        ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
    }
    optional: {
        /// Takes the optional access flags, such as relaxed ordering; since rdma-core 28.
        ibv_reg_mr_iova2: fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        /// Since rdma-core 34.
        ibv_reg_dmabuf_mr: fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        /// Since rdma-core 35.
        ibv_is_fork_initialized: fn() -> c_int;
        /// Keeps registered pages from children, on kernels that need it.
        ibv_fork_init: fn() -> c_int;
        /// Tells the kind of an address without the files of the kernel; since rdma-core 32.
        _ibv_query_gid_ex: fn(*mut ibv_context, u32, u32, *mut KindOfGid, u32, usize) -> c_int;
    }
}

/// `ibv_gid_entry`: an entry of a port's address table with its kind.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KindOfGid {
    pub(crate) gid: [u64; 2],
    pub(crate) index: u32,
    pub(crate) port: u32,
    /// `ibv_gid_type`: 0 is InfiniBand, 1 RoCE v1, 2 RoCE v2.
    pub(crate) kind: u32,
    /// Index of the network interface; 0: none.
    pub(crate) interface: u32,
}

/// The loaded libibverbs. Every object made through it keeps it loaded.
pub struct Library {
    pub(crate) functions: Functions,
    source: Source,
    /// Whether the library keeps registered pages from children, once it was asked to.
    is_fork_protected: OnceLock<bool>,
}

/// Where the functions come from.
enum Source {
    /// Keeps the code of the functions loaded.
    SharedObject { _object: SharedObject },
    #[cfg(feature = "test-util")]
    Fake(Arc<crate::fake::Fabric>),
}

/// What happens to registered memory when the process forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkSafety {
    /// The kernel copies registered pages for the child, so that a fork harms nothing (Linux 5.12 and
    /// later).
    Safe,
    /// The library keeps registered pages from the child. A child that touches such a page dies.
    Protected,
    /// After a fork, a page that the parent writes moves away from under the device: transfers read or
    /// write stale memory. Set `RDMAV_FORK_SAFE=1`, or start children before memory is registered.
    Unsafe,
    /// The library is too old to tell.
    Unknown,
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
        let source = Source::SharedObject { _object: object };
        Ok(Arc::new(Self { functions, source, is_fork_protected: OnceLock::new() }))
    }

    /// Creates a library over the devices of a simulated fabric.
    #[cfg(feature = "test-util")]
    pub(crate) fn fake(functions: Functions, fabric: Arc<crate::fake::Fabric>) -> Arc<Self> {
        let source = Source::Fake(fabric);
        Arc::new(Self { functions, source, is_fork_protected: OnceLock::new() })
    }

    /// Returns the RDMA devices of this machine, in the library's order; empty if there are none.
    ///
    /// # Errors
    /// The kernel refused. A kernel without RDMA is no error and has no devices.
    pub fn devices(self: &Arc<Self>) -> Result<Vec<Device>> {
        self.call(|| Device::list(self))
    }

    /// Calls functions of the library that take no object.
    fn call<T>(&self, call: impl FnOnce() -> T) -> T {
        match &self.source {
            Source::SharedObject { .. } => call(),
            #[cfg(feature = "test-util")]
            Source::Fake(fabric) => crate::fake::with_fabric(fabric, call),
        }
    }

    /// Keeps pages that are registered from now on from children of this process, where the kernel does
    /// not copy them for the child. Called before a device is opened: the library refuses it once memory
    /// is registered.
    pub(crate) fn protect_from_forks(&self) {
        self.is_fork_protected.get_or_init(|| {
            // Protected pages cost a table and are lost to children: not where the kernel copies them.
            if self.fork_state() == Some(COPIED_ON_FORK) {
                return false;
            }
            let Some(protect) = self.functions.ibv_fork_init else { return false };
            // SAFETY: takes no argument; it sets up the library's own table of pages, once.
            self.call(|| unsafe { protect() }) == 0
        });
    }

    /// Returns the names of [`Self::devices`].
    ///
    /// # Errors
    /// Same as [`Self::devices`].
    pub fn device_names(self: &Arc<Self>) -> Result<Vec<String>> {
        Ok(self.devices()?.iter().map(|device| device.name().to_owned()).collect())
    }

    /// Returns what a fork does to registered memory. The first device that is opened makes the library
    /// protect it, where the kernel does not.
    pub fn fork_safety(&self) -> ForkSafety {
        match (self.fork_state(), self.is_fork_protected.get()) {
            (Some(0), _) | (None, Some(false)) => ForkSafety::Unsafe,
            (Some(1), _) | (None, Some(true)) => ForkSafety::Protected,
            (Some(COPIED_ON_FORK), _) => ForkSafety::Safe,
            _ => ForkSafety::Unknown,
        }
    }

    /// Returns `ibv_fork_status`, if the library is new enough to tell.
    fn fork_state(&self) -> Option<c_int> {
        let is_initialized = self.functions.ibv_is_fork_initialized?;
        // SAFETY: takes no argument and reads the state of the library.
        Some(self.call(|| unsafe { is_initialized() }))
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match &self.source {
            Source::SharedObject { .. } => FILE_NAME,
            #[cfg(feature = "test-util")]
            Source::Fake(_) => "fake",
        };
        f.debug_struct("Library").field("source", &source).finish_non_exhaustive()
    }
}
