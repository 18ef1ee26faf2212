//! RDMA devices of this machine: enumeration and opening.

use std::{ffi::CStr, fmt, io, ptr::NonNull, sync::Arc};

use rdma_sys::ibv_device;

use crate::{Context, Error, Library, Result, file_descriptor};

/// One RDMA device of this machine.
#[derive(Clone)]
pub struct Device {
    handle: NonNull<ibv_device>,
    name: Arc<str>,
    guid: u64,
    list: Arc<DeviceList>,
}

// SAFETY: a device is read-only data of the library that lives as long as its list, which the
// `Arc` keeps; opening one device from several threads at once is allowed by ibverbs.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) fn list(library: &Arc<Library>) -> Result<Vec<Self>> {
        let mut count = 0;
        // SAFETY: the call writes the number of entries to `count`, which lives past it.
        let first = unsafe { (library.functions.ibv_get_device_list)(&raw mut count) };
        let Some(first) = NonNull::new(first) else {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::ENOSYS) => Ok(Vec::new()), // the kernel has no RDMA at all
                _ => Err(Error::Call {
                    call: "ibv_get_device_list",
                    device: "-".to_owned(),
                    source: error,
                }),
            };
        };
        let list = Arc::new(DeviceList { first, library: Arc::clone(library) });
        let count = usize::try_from(count).unwrap_or(0);
        (0..count).filter_map(|index| Self::at(&list, index).transpose()).collect()
    }

    /// Returns the entry at an index below the count given by the library.
    fn at(list: &Arc<DeviceList>, index: usize) -> Result<Option<Self>> {
        // SAFETY: the list has at least `index + 1` entries and lives while `list` does.
        let slot = unsafe { list.first.add(index) };
        // SAFETY: as above; the library wrote every entry before it gave the list out.
        let Some(handle) = NonNull::new(unsafe { slot.read() }) else { return Ok(None) };
        let functions = &list.library.functions;
        // SAFETY: `handle` is a device of the living list.
        let name = unsafe { (functions.ibv_get_device_name)(handle.as_ptr()) };
        if name.is_null() {
            return Err(Error::last("ibv_get_device_name", "-"));
        }
        // SAFETY: the library gives a terminated string inside the device.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        // SAFETY: `handle` is a device of the living list.
        let guid = u64::from_be(unsafe { (functions.ibv_get_device_guid)(handle.as_ptr()) });
        Ok(Some(Self { handle, name: name.as_ref().into(), guid, list: Arc::clone(list) }))
    }

    /// Opens the device.
    ///
    /// # Errors
    /// No access to the device file, or the driver refused.
    pub fn open(&self) -> Result<Arc<Context>> {
        self.list.library.protect_from_forks();
        let functions = &self.list.library.functions;
        // SAFETY: `handle` is a device of the list that `self.list` keeps.
        let context = unsafe { (functions.ibv_open_device)(self.handle.as_ptr()) };
        let handle =
            NonNull::new(context).ok_or_else(|| Error::last("ibv_open_device", &self.name))?;
        let context = Context::new(handle, self.clone());
        file_descriptor::set_nonblocking(context.events()).map_err(|source| Error::Call {
            call: "fcntl",
            device: self.name().to_owned(),
            source,
        })?;
        Ok(Arc::new(context))
    }

    /// The device's name, such as `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's globally unique id.
    pub fn guid(&self) -> u64 {
        self.guid
    }

    pub(crate) fn library(&self) -> &Library {
        &self.list.library
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guid = format_args!("{:016x}", self.guid);
        f.debug_struct("Device").field("name", &self.name).field("guid", &guid).finish()
    }
}

/// The array returned by the library; its devices are valid until it is freed.
struct DeviceList {
    first: NonNull<*mut ibv_device>,
    library: Arc<Library>,
}

// SAFETY: the array is never written after the library gave it out, and freeing it is done once,
// by the last owner.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: `first` came from ibv_get_device_list and is freed once, here; every device
        // holds an `Arc` of this list, so that none is left.
        unsafe { (self.library.functions.ibv_free_device_list)(self.first.as_ptr()) }
    }
}
