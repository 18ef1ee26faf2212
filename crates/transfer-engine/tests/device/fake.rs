//! The fake driver: compiled once, and loaded under a different name by each test.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use libloading::os::unix::Library;
use tempfile::TempDir;

/// The driver of one test.
pub(crate) struct Fake {
    folder: TempDir,
    library: Library,
}

/// Returns the compiled driver. Rust links with the same compiler, so that it is always there.
fn compiled() -> &'static Path {
    static COMPILED: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_folder, file) = COMPILED.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device/fake_driver.c");
        let file = folder.path().join("libfake.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o"]);
        let run = compiler.arg(&file).arg(source).output().expect("the C compiler `cc` starts");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        (folder, file)
    });
    file
}

/// Returns a copy of the driver that no other test has loaded.
pub(crate) fn driver_file() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let copy = folder.path().join("libcuda.so.1");
    std::fs::copy(compiled(), &copy).unwrap();
    (folder, copy)
}

impl Fake {
    /// Loads a driver and makes a context current in this thread, as a program with device memory
    /// does.
    pub(crate) fn load() -> Self {
        let (folder, file) = driver_file();
        Self::load_from(folder, &file)
    }

    pub(crate) fn load_from(folder: TempDir, file: &Path) -> Self {
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(file) }.unwrap();
        let fake = Self { folder, library };
        let init = fake.function::<unsafe extern "C" fn(u32) -> i32>("cuInit");
        // SAFETY: the function has that type in the fake's source, as everywhere below.
        assert_eq!(unsafe { init(0) }, 0);
        fake.enter(0);
        fake
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("libcuda.so.1")
    }

    /// Makes the shared context of a device current in this thread.
    pub(crate) fn enter(&self, device: i32) {
        let retain: unsafe extern "C" fn(*mut usize, i32) -> i32 =
            self.function("cuDevicePrimaryCtxRetain");
        let push: unsafe extern "C" fn(usize) -> i32 = self.function("cuCtxPushCurrent_v2");
        let mut context = 0;
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { retain(&raw mut context, device) }, 0);
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { push(context) }, 0);
    }

    /// Allocates device memory with these bytes and returns its address.
    pub(crate) fn memory(&self, bytes: &[u8]) -> usize {
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> i32 = self.function("cuMemAlloc_v2");
        let mut address = 0;
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { allocate(&raw mut address, bytes.len()) }, 0);
        let poke: unsafe extern "C" fn(u64, *const u8, usize) -> i32 = self.function("fake_poke");
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { poke(address, bytes.as_ptr(), bytes.len()) }, 0);
        address as usize
    }

    /// Returns the current bytes of device memory.
    pub(crate) fn bytes(&self, address: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let peek: unsafe extern "C" fn(u64, *mut u8, usize) -> i32 = self.function("fake_peek");
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { peek(address as u64, bytes.as_mut_ptr(), length) }, 0);
        bytes
    }

    /// Creates a stream of the device whose context is current.
    pub(crate) fn stream(&self) -> usize {
        let create: unsafe extern "C" fn(*mut usize, u32) -> i32 = self.function("cuStreamCreate");
        let mut stream = 0;
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { create(&raw mut stream, 0) }, 0);
        stream
    }

    /// Queues a fill of device memory on a stream.
    pub(crate) fn fill(&self, stream: usize, address: usize, byte: u8, length: usize) {
        let fill: unsafe extern "C" fn(usize, u64, i32, usize) -> i32 = self.function("fake_fill");
        // SAFETY: see `load_from`.
        assert_eq!(unsafe { fill(stream, address as u64, i32::from(byte), length) }, 0);
    }

    pub(crate) fn refuse_copies(&self, is_refused: bool) {
        let refuse: unsafe extern "C" fn(i32) = self.function("fake_refuse_copies");
        // SAFETY: see `load_from`.
        unsafe { refuse(i32::from(is_refused)) };
    }

    #[cfg(feature = "rdma")]
    pub(crate) fn refuse_exports(&self, is_refused: bool) {
        let refuse: unsafe extern "C" fn(i32) = self.function("fake_refuse_exports");
        // SAFETY: see `load_from`.
        unsafe { refuse(i32::from(is_refused)) };
    }

    pub(crate) fn depth(&self) -> i32 {
        let depth: unsafe extern "C" fn() -> i32 = self.function("fake_depth");
        // SAFETY: see `load_from`.
        unsafe { depth() }
    }

    pub(crate) fn retained(&self, device: i32) -> i32 {
        let retained: unsafe extern "C" fn(i32) -> i32 = self.function("fake_retained");
        // SAFETY: see `load_from`.
        unsafe { retained(device) }
    }

    /// Returns the pinned bytes, current and maximal.
    pub(crate) fn pinned(&self) -> (usize, usize) {
        let now: unsafe extern "C" fn() -> usize = self.function("fake_pinned_bytes");
        let most: unsafe extern "C" fn() -> usize = self.function("fake_pinned_bytes_max");
        // SAFETY: see `load_from`.
        let now = unsafe { now() };
        // SAFETY: see `load_from`.
        (now, unsafe { most() })
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers name the type that the function has in the fake's source.
        *unsafe { self.library.get(name.as_bytes()) }.unwrap()
    }
}
