//! The CUDA driver: the library, loaded by name at run time, and the functions that are called.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fmt,
    marker::PhantomData,
    os::fd::{FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    ptr,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mooncake_base::sync::Mutex;
use mooncake_base::{Error, ErrorCode, Result};

use super::Stream;
use crate::transfer_entry::LocalRange;

/// A device, by the ordinal of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ordinal(c_int);

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Contexts and streams are opaque pointers of the driver.
type Handle = usize;

/// An address in device memory.
type DeviceAddress = u64;

/// Direction of a copy between a device and pinned memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Direction {
    ToHost,
    ToDevice,
}

const SUCCESS: c_int = 0;
const ERROR_INVALID_CONTEXT: c_int = 201;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`
const MEMORY_TYPE: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
const DEVICE_ORDINAL: c_int = 9;
/// `CU_MEMORYTYPE_DEVICE`
const IS_DEVICE: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
const PORTABLE: c_uint = 1;

/// `CU_STREAM_PER_THREAD`. This value and smaller ones are default streams of the current context,
/// and not pointers.
const STREAM_PER_THREAD: usize = 2;

/// Loads each function of the list by its name in the library.
macro_rules! functions {
    ($($name:ident $symbol:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the one in cuda.h, where every suffixed name keeps
                        // its signature for good. The pointer stays valid because `Driver` keeps
                        // the library.
                        let found = unsafe { library.get($symbol.as_bytes()) };
                        *found?
                    },)*
                })
            }
        }
    };
}

// A macro because each function becomes both a typed field and a symbol to look up.
functions! {
    init "cuInit" (c_uint);
    error_name "cuGetErrorName" (c_int, *mut *const c_char);
    device_count "cuDeviceGetCount" (*mut c_int);
    pointer_attribute "cuPointerGetAttribute" (*mut c_uint, c_int, DeviceAddress);
    primary_state "cuDevicePrimaryCtxGetState" (c_int, *mut c_uint, *mut c_int);
    retain_primary "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    release_primary "cuDevicePrimaryCtxRelease_v2" (c_int);
    current_context "cuCtxGetCurrent" (*mut Handle);
    push_context "cuCtxPushCurrent_v2" (Handle);
    pop_context "cuCtxPopCurrent_v2" (*mut Handle);
    stream_context "cuStreamGetCtx" (Handle, *mut Handle);
    synchronize "cuStreamSynchronize" (Handle);
    to_host "cuMemcpyDtoHAsync_v2" (*mut u8, DeviceAddress, usize, Handle);
    to_device "cuMemcpyHtoDAsync_v2" (DeviceAddress, *const u8, usize, Handle);
    allocate_pinned "cuMemHostAlloc" (*mut *mut u8, usize, c_uint);
    free_pinned "cuMemFreeHost" (*mut u8);
}

/// `cuMemGetHandleForAddressRange`
type ExportRange = unsafe extern "C" fn(*mut c_void, DeviceAddress, usize, c_int, u64) -> c_int;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF: c_int = 1;

/// `cuDeviceGetPCIBusId`
type PciBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
/// Bytes for a PCI address of the driver, with its end.
const PCI_BYTES: usize = 32;

/// The driver library, loaded and initialised.
pub(super) struct Driver {
    functions: Functions,
    /// Since CUDA 11.7.
    export: Option<ExportRange>,
    pci_bus_id: Option<PciBusId>,
    /// Primary contexts of the process that were retained so far.
    primaries: Mutex<HashMap<Ordinal, Handle>>,
    file: PathBuf,
    _library: Library,
}

impl Driver {
    /// Loads and initialises the library.
    ///
    /// # Errors
    /// The library is missing, is not a driver, or does not start, for example without a device.
    pub(super) fn load(file: &Path) -> Result<Self> {
        // SAFETY: loading runs the initialisers of the driver, which set up its own state and have
        // no preconditions.
        let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| {
            unsupported("no CUDA driver could be loaded", file).caused_by(error)
        })?;
        Self::start(library, file)
    }

    /// Returns the library if this process has loaded it.
    ///
    /// # Errors
    /// The library is not a driver, or does not start.
    pub(super) fn loaded(file: &Path) -> Result<Option<Self>> {
        // SAFETY: nothing is loaded, so no initialiser runs.
        let found = unsafe { Library::open(Some(file), RTLD_NOW | libc::RTLD_NOLOAD) };
        found.ok().map(|library| Self::start(library, file)).transpose()
    }

    fn start(library: Library, file: &Path) -> Result<Self> {
        let functions = Functions::find(&library).map_err(|error| {
            unsupported("the library lacks a function of the CUDA driver", file).caused_by(error)
        })?;
        // SAFETY: the type is the one in cuda.h. The pointer stays valid because `Driver` keeps the
        // library.
        let export = unsafe { library.get::<ExportRange>(b"cuMemGetHandleForAddressRange") };
        let export = export.ok().map(|symbol| *symbol);
        // SAFETY: as above.
        let pci_bus_id = unsafe { library.get::<PciBusId>(b"cuDeviceGetPCIBusId") };
        let pci_bus_id = pci_bus_id.ok().map(|symbol| *symbol);
        let (primaries, file) = (Mutex::default(), file.to_owned());
        let driver = Self { functions, export, pci_bus_id, primaries, file, _library: library };
        // SAFETY: may be called at any time, any number of times; the flags must be zero.
        let status = unsafe { (driver.functions.init)(0) };
        if status == SUCCESS {
            return Ok(driver);
        }
        let name = driver.name_of(status);
        Err(unsupported("the CUDA driver does not start", &driver.file).with("status", name))
    }

    /// Returns the device that an address belongs to, if any.
    pub(super) fn owner(&self, address: DeviceAddress) -> Option<Ordinal> {
        let kind = match self.attribute(MEMORY_TYPE, address) {
            // This thread has no current context yet.
            Err(ERROR_INVALID_CONTEXT) => {
                let _current = self.push_context(Stream::DEFAULT, Some(self.active()?)).ok()?;
                let kind = self.attribute(MEMORY_TYPE, address).ok()?;
                return self.owner_of_kind(kind, address);
            }
            answer => answer.ok()?,
        };
        self.owner_of_kind(kind, address)
    }

    /// Exports whole pages of device memory as a dma-buf.
    ///
    /// # Errors
    /// The driver is too old, or refuses to export the memory.
    pub(super) fn export(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        length: usize,
    ) -> Result<OwnedFd> {
        let Some(export) = self.export else {
            let error = unsupported("the CUDA driver exports no memory", &self.file);
            return Err(error.with("since", "CUDA 11.7"));
        };
        let _current = self.push_context(Stream::DEFAULT, Some(device))?;
        let mut file: c_int = -1;
        // SAFETY: for this kind of handle the driver writes an int.
        let status = unsafe { export((&raw mut file).cast(), address, length, DMA_BUF, 0) };
        self.check(status, "cuMemGetHandleForAddressRange")?;
        // SAFETY: a descriptor that the driver made for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// Returns the PCI address of a device as the kernel writes it, such as `0000:3b:00.0`. Ordinals follow
    /// the environment of the process and say nothing about the place of a device.
    pub(super) fn pci_address(&self, device: Ordinal) -> Option<String> {
        let ask = self.pci_bus_id?;
        let mut text = [0_u8; PCI_BYTES];
        // SAFETY: the driver writes at most as many bytes as it is told, with the end of the text.
        let status = unsafe { ask(text.as_mut_ptr().cast(), PCI_BYTES as c_int, device.0) };
        let text = (status == SUCCESS).then(|| CStr::from_bytes_until_nul(&text).ok()).flatten()?;
        text.to_str().ok().map(str::to_lowercase)
    }

    /// Identifies the library among all libraries of this process.
    pub(super) fn library(&self) -> usize {
        self.functions.init as usize
    }

    fn owner_of_kind(&self, kind: c_uint, address: DeviceAddress) -> Option<Ordinal> {
        let ordinal = || self.attribute(DEVICE_ORDINAL, address).ok()?.try_into().ok();
        (kind == IS_DEVICE).then(ordinal).flatten().map(Ordinal)
    }

    fn attribute(&self, which: c_int, address: DeviceAddress) -> Result<c_uint, c_int> {
        let mut value = 0;
        // SAFETY: both attributes are an int, which fits in `value`. The address is only looked up.
        let status = unsafe { (self.functions.pointer_attribute)(&raw mut value, which, address) };
        if status == SUCCESS { Ok(value) } else { Err(status) }
    }

    /// Returns a device that this process uses.
    fn active(&self) -> Option<Ordinal> {
        let mut count = 0;
        // SAFETY: writes one int.
        let status = unsafe { (self.functions.device_count)(&raw mut count) };
        let count = if status == SUCCESS { count } else { 0 };
        let is_active = |ordinal: &c_int| {
            let (mut flags, mut active) = (0, 0);
            let (flags, out) = (&raw mut flags, &raw mut active);
            // SAFETY: writes two ints.
            let status = unsafe { (self.functions.primary_state)(*ordinal, flags, out) };
            status == SUCCESS && active != 0
        };
        (0..count).find(is_active).map(Ordinal)
    }

    /// Makes a context current in this thread: the context of the stream or, for the default
    /// stream, the primary context of the device. Without a device, the current context is kept; if
    /// there is none, a device that this process uses is taken.
    ///
    /// # Errors
    /// There is no such stream or device.
    pub(super) fn push_context(
        &self,
        stream: Stream,
        device: Option<Ordinal>,
    ) -> Result<ContextGuard<'_>> {
        let context = match stream {
            Stream(0..=STREAM_PER_THREAD) => match device {
                Some(device) => self.primary(device)?,
                None => match self.current() {
                    Some(context) => context,
                    None => self.primary(self.active().unwrap_or(Ordinal(0)))?,
                },
            },
            Stream(handle) => {
                let mut context = 0;
                // SAFETY: `Stream` requires that the stream exists.
                let status = unsafe { (self.functions.stream_context)(handle, &raw mut context) };
                self.check(status, "cuStreamGetCtx")?;
                context
            }
        };
        // SAFETY: the context is alive: `self` retains it, an existing stream belongs to it, or it
        // is current in this thread.
        let status = unsafe { (self.functions.push_context)(context) };
        self.check(status, "cuCtxPushCurrent")?;
        Ok(ContextGuard { driver: self, _thread: PhantomData })
    }

    /// The context that is current in this thread.
    fn current(&self) -> Option<Handle> {
        let mut context = 0;
        // SAFETY: writes the handle, or null.
        let status = unsafe { (self.functions.current_context)(&raw mut context) };
        (status == SUCCESS && context != 0).then_some(context)
    }

    fn primary(&self, device: Ordinal) -> Result<Handle> {
        let mut primaries = self.primaries.lock();
        if let Some(context) = primaries.get(&device) {
            return Ok(*context);
        }
        let mut context = 0;
        // SAFETY: writes the handle; released when `self` is dropped.
        let status = unsafe { (self.functions.retain_primary)(&raw mut context, device.0) };
        self.check(status, "cuDevicePrimaryCtxRetain")?;
        primaries.insert(device, context);
        Ok(context)
    }

    fn check(&self, status: c_int, call: &'static str) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let error = Error::new(ErrorCode::TRANSFER_FAIL, "the CUDA driver refused a call");
        Err(error.with("call", call).with("status", self.name_of(status)))
    }

    fn name_of(&self, status: c_int) -> String {
        let mut name = ptr::null();
        // SAFETY: writes a pointer to a constant of the driver, or null for an unknown status.
        let named = unsafe { (self.functions.error_name)(status, &raw mut name) };
        if named != SUCCESS || name.is_null() {
            return status.to_string();
        }
        // SAFETY: a constant string, see above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for device in self.primaries.get_mut().keys() {
            // SAFETY: retained once by `primary`; every object created in the context is gone,
            // since it keeps the driver. A driver that has shut down before only returns an error.
            unsafe { (self.functions.release_primary)(device.0) };
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Keeps a context current in this thread until it is dropped.
pub(super) struct ContextGuard<'a> {
    driver: &'a Driver,
    /// The current context belongs to a thread, so the guard must not move to another.
    _thread: PhantomData<*const ()>,
}

impl ContextGuard<'_> {
    /// Queues a copy between device memory and pinned memory on a stream. Both ranges must be left
    /// alone until the stream is synchronized.
    pub(super) fn copy(
        &self,
        direction: Direction,
        device: LocalRange,
        pinned: LocalRange,
        stream: Stream,
    ) -> Result<()> {
        debug_assert_eq!(device.length(), pinned.length(), "both sides are of one length");
        let (address, host) = (device.address() as u64, pinned.address() as *mut u8);
        let functions = &self.driver.functions;
        let (status, call) = match direction {
            Direction::ToHost => {
                // SAFETY: the pool keeps the pinned range reserved until the stream was
                // synchronized; the driver checks the device address.
                let status =
                    unsafe { (functions.to_host)(host, address, pinned.length(), stream.0) };
                (status, "cuMemcpyDtoHAsync")
            }
            Direction::ToDevice => {
                // SAFETY: as above.
                let status =
                    unsafe { (functions.to_device)(address, host, pinned.length(), stream.0) };
                (status, "cuMemcpyHtoDAsync")
            }
        };
        self.driver.check(status, call)
    }

    /// Waits until all work queued on a stream is done.
    pub(super) fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: `Stream` requires that the stream exists, and its context is current.
        let status = unsafe { (self.driver.functions.synchronize)(stream.0) };
        self.driver.check(status, "cuStreamSynchronize")
    }

    /// Allocates memory that a device can access directly, to be freed by
    /// [`ContextGuard::free_pinned`].
    pub(super) fn allocate_pinned(&self, length: usize) -> Result<ptr::NonNull<u8>> {
        let mut address = ptr::null_mut();
        // SAFETY: writes one pointer.
        let status =
            unsafe { (self.driver.functions.allocate_pinned)(&raw mut address, length, PORTABLE) };
        self.driver.check(status, "cuMemHostAlloc")?;
        ptr::NonNull::new(address).ok_or_else(|| Error::internal("the driver returned no address"))
    }

    /// Frees pinned memory.
    ///
    /// # Safety
    /// The memory is from [`ContextGuard::allocate_pinned`], was not freed, and is not in use.
    pub(super) unsafe fn free_pinned(&self, address: ptr::NonNull<u8>) -> Result<()> {
        // SAFETY: promised by the caller.
        let status = unsafe { (self.driver.functions.free_pinned)(address.as_ptr()) };
        self.driver.check(status, "cuMemFreeHost")
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let mut context = 0;
        // SAFETY: `push_context` pushed a context in this very thread.
        unsafe { (self.driver.functions.pop_context)(&raw mut context) };
    }
}

fn unsupported(text: &'static str, file: &Path) -> Error {
    Error::new(ErrorCode::NOT_SUPPORTED, text).with("library", file.display())
}
