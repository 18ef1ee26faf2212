//! What can go wrong with a directory, said with its path and the remedy.

use std::{fmt, io, path::PathBuf};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a directory cannot be used.
#[derive(Debug)]
pub enum Error {
    /// An operation on a file failed.
    Io {
        /// What was attempted, as `open`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// Another process has the directory open.
    InUse {
        /// The directory.
        path: PathBuf,
        /// Process id and host of that process, as it wrote them.
        holder: String,
    },
    /// A later version of the package made the directory.
    Newer {
        /// The directory.
        path: PathBuf,
        /// What it has that this version does not know.
        what: String,
    },
    /// The directory is not one of ours, or its identity file is damaged.
    Foreign {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// An option is out of its range.
    Invalid(String),
}

impl Error {
    /// Returns a function that adds an action and a path to an error of the system.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.into(), source }
    }

    /// Tells whether a part of the device or of its file system is damaged, so that other files may be
    /// good.
    pub(crate) fn is_of_medium(&self) -> bool {
        use rustix::io::Errno;
        let Self::Io { source, .. } = self else { return false };
        // The last three are what file systems answer whose own checksums do not hold.
        [Errno::IO, Errno::NODATA, Errno::REMOTEIO, Errno::ILSEQ, Errno::UCLEAN, Errno::BADMSG]
            .iter()
            .any(|errno| source.raw_os_error() == Some(errno.raw_os_error()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { action, path, source } => {
                write!(f, "cannot {action} {}: {source}", path.display())
            }
            Self::InUse { path, holder } => write!(
                f,
                "{} is in use by {holder}: stop that process, or give each process a directory \
                 of its own",
                path.display()
            ),
            Self::Newer { path, what } => write!(
                f,
                "{} was made by a later version of mooncake ({what}): use that version, or empty \
                 the directory",
                path.display()
            ),
            Self::Foreign { path, why } => write!(
                f,
                "{} is no directory of records: {why}; name another directory, or empty this one",
                path.display()
            ),
            Self::Invalid(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
