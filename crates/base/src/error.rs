//! One error type for every crate, and the one table that maps upstream's numeric codes to our
//! coarse kinds and the Python exceptions.

use std::{borrow::Cow, fmt, sync::Arc};

/// The result type of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of a failure, by the reaction that it requires of the caller. A kind exists only if a
/// caller would act differently on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The call itself is wrong: fix the arguments.
    InvalidArgument,
    /// The handle is not set up, or was closed, or belongs to another process: set it up.
    Closed,
    /// The named thing does not exist.
    NotFound,
    /// The named thing exists already.
    AlreadyExists,
    /// The object is still being written: wait.
    NotReady,
    /// A lease, a task or a reader holds the object: wait, or use force.
    Busy,
    /// There is no free memory, and nothing may be evicted: add memory, unpin, or retry later.
    NoSpace,
    /// The tenant's quota does not allow it: raise the quota or remove objects.
    QuotaExceeded,
    /// The master or a metadata server cannot be reached: check the address, retry.
    Unavailable,
    /// The deadline passed: retry, or allow more time.
    Timeout,
    /// The bytes could not be moved: the peer died or refused the address; retry elsewhere.
    TransferFailed,
    /// The bytes do not match their checksum, or a file is damaged: do not use them.
    Corrupt,
    /// The caller may not do this: check token and owner.
    PermissionDenied,
    /// This build or configuration cannot do it.
    NotSupported,
    /// A file or device operation failed: read the message.
    Storage,
    /// A bug in this program: report it.
    Internal,
}

/// An error number of the upstream API with its name. Our code uses the names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ErrorCode(i32);

/// One row of the table of codes.
#[derive(Debug, Clone, Copy)]
pub struct CodeRow {
    /// The error code.
    pub code: ErrorCode,
    /// The upstream name.
    pub name: &'static str,
    /// The kind of failure.
    pub kind: ErrorKind,
    /// One sentence: the usual cause; the remedy.
    pub remedy: &'static str,
}

impl CodeRow {
    /// Returns whether any call can return the code today.
    pub fn is_returned(&self) -> bool {
        !self.remedy.starts_with("(never returned today)")
    }
}

macro_rules! codes {
    ($($name:ident = $number:literal, $kind:ident, $remedy:literal;)*) => {
        impl ErrorCode {
            $(#[doc = $remedy] pub const $name: Self = Self($number);)*
        }
        /// Every code, in the order of the reference page. No other place holds the numbers.
        pub const CODES: &[CodeRow] = &[
            $(CodeRow {
                code: ErrorCode::$name,
                name: stringify!($name),
                kind: ErrorKind::$kind,
                remedy: $remedy,
            },)*
        ];
    };
}

// A macro because a row must become both a named constant and a line of data, once.
codes! {
    INTERNAL_ERROR = -1, Internal, "An unexpected failure inside, which the message describes; please report it.";
    BUFFER_OVERFLOW = -10, InvalidArgument, "The destination is smaller than the data; give a larger buffer.";
    SHARD_INDEX_OUT_OF_RANGE = -100, Internal, "(never returned today) A metadata shard does not exist; please report it.";
    SEGMENT_NOT_FOUND = -101, NotFound, "No segment of that name or id is mounted; check the name.";
    SEGMENT_ALREADY_EXISTS = -102, AlreadyExists, "A segment with that id is mounted already; use it or unmount it first.";
    CLIENT_NOT_FOUND = -103, NotFound, "The master does not know this client; it registers again by itself, then retry.";
    NO_AVAILABLE_HANDLE = -200, NoSpace, "No segment has a free range that is long enough, and what may be evicted would not make one; add memory, wait for leases to expire, or unpin objects.";
    INVALID_VERSION = -300, NotSupported, "The two sides speak different protocol versions; upgrade the older one.";
    INVALID_KEY = -400, InvalidArgument, "The key is longer than 64 KiB; use a shorter one. An empty key gives -600, as in upstream.";
    WRITE_FAIL = -500, TransferFailed, "Writing failed; retry.";
    INVALID_PARAMS = -600, InvalidArgument, "An argument is wrong, or upstream's setup reached no master, or one that refused its token; the message names the cause.";
    ILLEGAL_CLIENT = -601, PermissionDenied, "The other end asks for a token that this process does not have, or another client began the operation; set the token that the message names, or use the client that began it.";
    INVALID_WRITE = -700, InvalidArgument, "(never returned today) The write is outside the object; check offset and size.";
    INVALID_READ = -701, InvalidArgument, "(never returned today) The read is outside the object; check offset and size.";
    INVALID_REPLICA = -702, NotReady, "(never returned today) No replica is in a state that allows this; retry.";
    REPLICA_IS_NOT_READY = -703, NotReady, "The object is still being written; wait for its writer.";
    OBJECT_NOT_FOUND = -704, NotFound, "No object has that key; it was never put, or was removed, evicted or lost.";
    OBJECT_ALREADY_EXISTS = -705, AlreadyExists, "An object has that key, or another version than the call names; use upsert to replace it, or ask for its version again.";
    OBJECT_HAS_LEASE = -706, Busy, "A client leased the object, by lease() or by a read through upstream's names; wait for the lease to expire, or use force. If the message says that the object is hard-pinned, ask for the removal of pinned objects, too.";
    LEASE_EXPIRED = -707, Timeout, "The read took longer than its lease and its bytes were discarded; retry.";
    OBJECT_HAS_REPLICATION_TASK = -708, Busy, "A copy or move of this object is running; wait for it.";
    OBJECT_NO_REPLICATION_TASK = -709, NotFound, "(never returned today) No copy or move of this object is running; create one first.";
    REPLICA_NOT_FOUND = -710, NotFound, "(never returned today) The object has no replica on that segment; query the segments of its replicas.";
    REPLICA_ALREADY_EXISTS = -711, AlreadyExists, "(never returned today) The object has a replica on that segment already; no action is needed.";
    REPLICA_IS_GONE = -712, NotFound, "The replica was removed meanwhile; retry.";
    REPLICA_NOT_IN_LOCAL_MEMORY = -713, NotFound, "(never returned today) The replica is not in this client's memory; ask the client that holds it.";
    OBJECT_REPLICA_BUSY = -714, Busy, "Replicas of the object are in use; retry.";
    TRANSFER_FAIL = -800, TransferFailed, "The bytes could not be moved; the process that holds them may be gone, or use another metadata server: StoreConfig(metadata=…).";
    CHECKSUM_MISMATCH = -801, Corrupt, "The bytes do not match their checksum; remove the object and put it again.";
    RPC_FAIL = -900, Unavailable, "The master could not be reached; check that it runs at the address in the message.";
    RPC_TIMEOUT = -901, Timeout, "No reply within the deadline; the other side may be overloaded, stopped or far away. Retry or allow more time.";
    ETCD_OPERATION_ERROR = -1000, Unavailable, "etcd refused or could not be reached; check its address.";
    ETCD_KEY_NOT_EXIST = -1001, NotFound, "(never returned today) etcd has no such key; check the cluster's name and that its masters ran.";
    ETCD_TRANSACTION_FAIL = -1002, Busy, "(never returned today) Another client changed the key in etcd; retry.";
    ETCD_CTX_CANCELLED = -1003, Timeout, "(never returned today) The call to etcd was cancelled; retry.";
    OPLOG_ENTRY_NOT_FOUND = -1004, NotFound, "(never returned today) The log has no such entry; it was truncated after a snapshot, so begin with the snapshot.";
    K8S_LEASE_OPERATION_ERROR = -1005, Unavailable, "The Kubernetes API refused a change of the Lease, or could not be asked; check the permissions of the service account.";
    K8S_LEASE_NOT_FOUND = -1006, NotFound, "(never returned today) The Kubernetes lease does not exist; check its name and namespace.";
    INCOMPLETE_OPLOG_CATCH_UP = -1007, Unavailable, "(never returned today) The standby could not prove that it has the whole log; keep the other master, or accept the loss.";
    UNAVAILABLE_IN_CURRENT_STATUS = -1010, Unavailable, "Not possible in the state that the message names; nothing was changed.";
    UNAVAILABLE_IN_CURRENT_MODE = -1011, NotSupported, "The master runs without the feature this needs; start it with the option that the message names.";
    NOT_SUPPORTED = -1012, NotSupported, "This build or configuration does not support that; do not use the option or call.";
    FILE_NOT_FOUND = -1100, Storage, "The file does not exist; check the path.";
    FILE_OPEN_FAIL = -1101, Storage, "The file could not be opened; check the path and its permissions.";
    FILE_READ_FAIL = -1102, Storage, "The file could not be read; check the disk and its permissions.";
    FILE_WRITE_FAIL = -1103, Storage, "The file could not be written; check the free space of the disk and its permissions.";
    FILE_INVALID_BUFFER = -1104, Storage, "(never returned today) The buffer for the file is not valid; check its address and size.";
    FILE_LOCK_FAIL = -1105, Storage, "Another process uses the directory, or has locked the file; end that process, or name another.";
    FILE_INVALID_HANDLE = -1106, Storage, "(never returned today) The file handle is not valid; open the file again.";
    BUCKET_NOT_FOUND = -1200, Storage, "(never returned today) The bucket does not exist; the object is no longer on the disk, so put it again.";
    BUCKET_ALREADY_EXISTS = -1201, Storage, "(never returned today) The bucket exists already; use another directory for each client.";
    KEYS_EXCEED_BUCKET_LIMIT = -1202, Storage, "(never returned today) The bucket has reached its limit of keys; raise the limit, or use larger objects.";
    KEYS_ULTRA_LIMIT = -1203, Storage, "(never returned today) The storage has reached its limit of keys; remove some, or raise the limit.";
    UNABLE_OFFLOAD = -1300, NotSupported, "The master keeps objects in memory only; start it with --enable_offload.";
    UNABLE_OFFLOADING = -1301, Busy, "(never returned today) Offload cannot run now; retry.";
    TASK_NOT_FOUND = -1400, NotFound, "No task has that id, or its record has expired; query a task soon after it ends.";
    TASK_PENDING_LIMIT_EXCEEDED = -1401, Busy, "Too many tasks are pending; retry later.";
    JOB_NOT_FOUND = -1402, NotFound, "No drain job has that id, or its record has expired; list the jobs to see their ids.";
    SERIALIZE_UNSUPPORTED = -1500, NotSupported, "(never returned today) The snapshot format cannot hold this value; please report it.";
    SERIALIZE_FAIL = -1501, Storage, "(never returned today) The snapshot could not be encoded; please report it.";
    DESERIALIZE_FAIL = -1502, Corrupt, "(never returned today) The snapshot could not be decoded; move it aside, and start from an older one or without one.";
    PERSISTENT_FAIL = -1503, Storage, "The snapshot could not be stored; check the free space of the disk and its permissions.";
    DFS_NETWORK_TIMEOUT = -1600, Timeout, "(never returned today) The distributed file system did not answer; check its network, then retry.";
    DFS_SERVICE_UNAVAILABLE = -1601, Unavailable, "No distributed file system is configured; leave dfs_replica_num at 0.";
    DFS_QUOTA_EXCEEDED = -1602, QuotaExceeded, "(never returned today) The distributed file system's quota is used up; remove files or raise the quota.";
    DFS_PERMISSION_DENIED = -1603, PermissionDenied, "(never returned today) The distributed file system denies access; check the permissions of this user.";
    DFS_STALE_HANDLE = -1604, Storage, "(never returned today) The file handle is stale; retry.";
    DFS_PARTIAL_WRITE = -1605, Storage, "(never returned today) Only a part of the data was written; retry.";
    TENANT_QUOTA_EXCEEDED = -1700, QuotaExceeded, "The tenant's quota is used up and none of its objects may be evicted; remove objects or raise the quota.";
    TENANT_NOT_REGISTERED = -1701, PermissionDenied, "The tenant has no quota policy; add one.";
    TENANT_NOT_EMPTY = -1702, Busy, "The tenant still owns objects; remove them first.";
}

impl ErrorCode {
    /// Returns the code with this number, if the table has one.
    pub fn from_number(number: i32) -> Option<Self> {
        CODES.iter().find(|row| row.code.0 == number).map(|row| row.code)
    }

    /// Returns the bare number, for adapters and wire formats.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// Returns the row of the table for this code.
    pub fn row(self) -> &'static CodeRow {
        CODES.iter().find(|row| row.code == self).expect("a code is made only from the table")
    }

    /// Returns the kind of failure.
    pub fn kind(self) -> ErrorKind {
        self.row().kind
    }

    /// Returns the upstream name.
    pub fn name(self) -> &'static str {
        self.row().name
    }
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// A failure: a code (which implies a kind), a message, the values involved, and its cause.
///
/// Messages are lower case without a full stop; values go into the context, as `key=value`.
/// Cloning is cheap, so that one failed connection can fail every entry of a batch.
#[derive(Clone)]
pub struct Error(Arc<Parts>);

#[derive(Clone)]
struct Parts {
    kind: ErrorKind,
    code: ErrorCode,
    message: String,
    context: Vec<(Cow<'static, str>, String)>,
    /// Number of values at the start of the context that the message has, too.
    told: usize,
    /// The remedy of this case, instead of the remedy of the code.
    remedy: Option<&'static str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Creates an error with a code and a message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::with_kind(code.kind(), code, message.into())
    }

    /// Creates an error for a wrong argument.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::INVALID_PARAMS, message)
    }

    /// Creates an error for a handle that is not set up or was closed.
    ///
    /// The error carries upstream's code for a bad argument, because callers test for that code.
    pub fn closed(message: impl Into<String>) -> Self {
        Self::with_kind(ErrorKind::Closed, ErrorCode::INVALID_PARAMS, message.into())
    }

    /// Creates an error for a broken invariant.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::INTERNAL_ERROR, message)
    }

    /// Restores an error of another process from its text, which has the values of the context.
    pub fn restored(
        code: ErrorCode,
        text: impl Into<String>,
        context: impl IntoIterator<Item = (String, String)>,
    ) -> Self {
        let mut error = Self::new(code, text);
        let parts = Arc::make_mut(&mut error.0);
        parts.context = context.into_iter().map(|(name, value)| (name.into(), value)).collect();
        parts.told = parts.context.len();
        error
    }

    /// Sets the remedy of this case, where that of the code is too general.
    #[must_use]
    pub fn with_remedy(mut self, remedy: &'static str) -> Self {
        Arc::make_mut(&mut self.0).remedy = Some(remedy);
        self
    }

    /// Adds a name and a value to the context.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        let value = value.to_string();
        let context = &mut Arc::make_mut(&mut self.0).context;
        // Callers on several levels may name the same thing.
        if !context.iter().any(|(known, present)| known == name && *present == value) {
            context.push((name.into(), value));
        }
        self
    }

    /// Sets the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).source = Some(Arc::new(source));
        self
    }

    /// Returns the upstream code.
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }

    /// Returns the kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the message, without context or cause.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the names and values involved: those of this error, then those of its causes.
    pub fn context(&self) -> impl Iterator<Item = (&str, &str)> {
        std::iter::successors(Some(self), |error| {
            let mut cause = std::error::Error::source(*error);
            while let Some(inner) = cause {
                if let Some(error) = inner.downcast_ref::<Self>() {
                    return Some(error);
                }
                cause = inner.source();
            }
            None
        })
        .flat_map(|error| error.0.context.iter().map(|(name, value)| (&**name, &**value)))
    }

    /// Returns the remedy that usually helps.
    pub fn remedy(&self) -> &'static str {
        match self.kind() {
            _ if self.0.remedy.is_some() => self.0.remedy.unwrap_or_default(),
            ErrorKind::Closed => {
                "The handle is not set up, was closed, or was made before a fork; set it up here."
            }
            _ => self.0.code.row().remedy,
        }
    }

    fn with_kind(kind: ErrorKind, code: ErrorCode, message: String) -> Self {
        let context = Vec::new();
        Self(Arc::new(Parts { kind, code, message, context, told: 0, remedy: None, source: None }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        for (name, value) in &self.0.context[self.0.told..] {
            write!(f, " {name}={value}")?;
        }
        let mut cause = std::error::Error::source(self);
        while let Some(inner) = cause {
            write!(f, ": {inner}")?;
            cause = inner.source();
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.0.code.name())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_have_a_remedy() {
        for (i, row) in CODES.iter().enumerate() {
            assert_eq!(ErrorCode::from_number(row.code.number()), Some(row.code));
            assert!(row.code.number() < 0, "{}", row.name);
            assert!(CODES[i + 1..].iter().all(|other| other.code != row.code), "{}", row.name);
            assert!(row.remedy.ends_with('.'), "{}", row.name);
            assert!(row.remedy.contains("; "), "{}: the cause; the remedy", row.name);
        }
        assert_eq!(ErrorCode::from_number(-12345), None);
    }

    #[test]
    fn display_shows_message_context_and_cause() {
        let error = Error::new(ErrorCode::OBJECT_NOT_FOUND, "object not found")
            .with("key", "a")
            .caused_by(std::io::Error::other("gone"));
        assert_eq!(error.to_string(), "object not found key=a: gone");
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn context_includes_that_of_the_causes() {
        let inner = Error::invalid("a size is wrong").with("bytes", 7);
        let error = Error::internal("no mount").with("segment", "s").caused_by(inner);
        assert_eq!(error.context().collect::<Vec<_>>(), [("segment", "s"), ("bytes", "7")]);
    }

    #[test]
    fn restored_error_shows_each_value_once() {
        let values = [("key".to_owned(), "k".to_owned())];
        let error = Error::restored(ErrorCode::OBJECT_NOT_FOUND, "no object key=k", values);
        let error = error.with("peer", "host:1");
        assert_eq!(error.to_string(), "no object key=k peer=host:1");
        assert_eq!(error.context().collect::<Vec<_>>(), [("key", "k"), ("peer", "host:1")]);
    }

    #[test]
    fn equal_fields_are_shown_once() {
        let error = Error::invalid("bad").with("file", "/x").with("file", "/x").with("file", "/y");
        assert_eq!(error.to_string(), "bad file=/x file=/y");
    }

    #[test]
    fn remedy_of_a_case_replaces_that_of_its_code() {
        let error = Error::new(ErrorCode::RPC_FAIL, "no metadata server");
        assert_eq!(error.remedy(), ErrorCode::RPC_FAIL.row().remedy);
        assert_eq!(error.with_remedy("Start it.").remedy(), "Start it.");
    }

    #[test]
    fn closed_handle_has_upstream_code_and_own_kind() {
        let error = Error::closed("the store is not set up");
        assert_eq!(error.code(), ErrorCode::INVALID_PARAMS);
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert_eq!(Error::invalid("x").kind(), ErrorKind::InvalidArgument);
    }
}
