//! What a member keeps about itself beside its log: its id, whether its log is complete, and where the
//! views in it began.

use std::sync::Arc;

use mooncake_base::{Error, ErrorCode, Result, SegmentId};
use mooncake_proto::standby::ViewStart;
use serde::{Deserialize, Serialize};

use super::{history_of, views};
use crate::journal::Directory;

/// The name of the file in the state directory.
const FILE: &str = "member.json";

/// Maximum number of characters of the host's name in an id.
const HOST_MAX: usize = 64;

/// The part that a member plays in a cluster, kept in a file.
#[derive(Debug, Clone)]
pub(super) struct Membership {
    directory: Arc<Directory>,
    kept: Kept,
}

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// The id of the member.
    member: String,
    /// Whether the log has every change that this member has ever confirmed.
    is_complete: bool,
    /// The boot of the machine in which the log became complete; what was written since is lost only with
    /// that boot.
    #[serde(default)]
    boot: Option<String>,
    /// Numbers of the views and of their first frames, in rising order.
    views: Vec<(u64, u64)>,
}

impl Membership {
    /// Reads the file, or makes one with a new id.
    ///
    /// # Errors
    /// The file is damaged, or cannot be read or written.
    pub(super) fn open(directory: Arc<Directory>) -> Result<Self> {
        if let Some(bytes) = directory.read_note(FILE)? {
            let kept = serde_json::from_slice(&bytes).map_err(|error| {
                let text = "the file of a member of the cluster is damaged; move the state directory \
                            away, so that this master follows from an empty log under a new id";
                Error::new(ErrorCode::PERSISTENT_FAIL, text).with("file", FILE).caused_by(error)
            })?;
            return Ok(Self { directory, kept });
        }
        let kept = Kept { member: new_id(), is_complete: true, boot: None, views: Vec::new() };
        let membership = Self { directory, kept };
        membership.write(&membership.kept)?;
        Ok(membership)
    }

    /// The id of the member.
    pub(super) fn member(&self) -> &str {
        &self.kept.member
    }

    /// Whether the log has every change that this member has ever confirmed.
    pub(super) const fn is_complete(&self) -> bool {
        self.kept.is_complete
    }

    /// Whether the log has become complete since the machine was started.
    pub(super) fn was_completed_in_this_boot(&self) -> bool {
        self.kept.is_complete && self.kept.boot.as_ref() == Some(&self.directory.boot())
    }

    /// Where the views in the log began.
    pub(super) fn views(&self) -> Vec<ViewStart> {
        let view = |&(view, first_frame): &(u64, u64)| ViewStart { view, first_frame };
        self.kept.views.iter().map(view).collect()
    }

    /// What the election needs to know.
    pub(super) fn history(&self) -> mooncake_election::History {
        history_of(&self.views())
    }

    /// Records whether the log is complete.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn set_complete(&mut self, is_complete: bool) -> Result<()> {
        let boot = is_complete.then(|| self.directory.boot());
        self.change(Kept { is_complete, boot, ..self.kept.clone() })
    }

    /// Records that the log is about to be emptied: until it has followed a leader, it is not complete.
    ///
    /// # Errors
    /// The log is that of a master that was never a member, or the file cannot be written.
    pub(super) fn give_up_log(&mut self, is_empty: bool) -> Result<()> {
        if !is_empty && self.kept.views.is_empty() {
            let text = "the state directory has the log of a master that was never a member of this \
                        cluster; to give its objects up, start this master with an empty one";
            return Err(Error::new(ErrorCode::PERSISTENT_FAIL, text));
        }
        self.set_complete(false)
    }

    /// Records that the log has everything that its leader had. Returns whether that is new.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn complete(&mut self) -> Result<bool> {
        let is_new = !self.kept.is_complete;
        self.set_complete(true)?;
        Ok(is_new)
    }

    /// Takes over the views of a leader whose log this one continues, or is replaced by.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn follow(&mut self, views: &[ViewStart]) -> Result<()> {
        let views = views.iter().map(|view| (view.view, view.first_frame)).collect();
        self.change(Kept { views, ..self.kept.clone() })
    }

    /// Records that this member leads in a view, which begins with a frame. Must be called before the
    /// frame is written.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn lead(&mut self, view: ViewStart) -> Result<()> {
        let mut known = self.views();
        views::add(&mut known, view);
        self.follow(&known)
    }

    fn change(&mut self, kept: Kept) -> Result<()> {
        if kept != self.kept {
            self.write(&kept)?;
            self.kept = kept;
        }
        Ok(())
    }

    fn write(&self, kept: &Kept) -> Result<()> {
        let bytes = serde_json::to_vec(kept).expect("numbers and strings are always JSON");
        self.directory.write_note(FILE, &bytes)
    }
}

/// Makes an id that operators recognise.
fn new_id() -> String {
    let host: String = mooncake_os::process::host_name()
        .chars()
        .filter(char::is_ascii_graphic)
        .take(HOST_MAX)
        .collect();
    let (random, _) = SegmentId::random().halves();
    format!("{host}-{random:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_stays_the_same_and_remembers_its_views() {
        let folder = tempfile::tempdir().unwrap();
        let open = || {
            let directory = Arc::new(Directory::lock(folder.path()).unwrap());
            Membership::open(directory).unwrap()
        };
        let mut member = open();
        let id = member.member().to_owned();
        assert!(member.is_complete() && member.views().is_empty());
        let views = [ViewStart { view: 3, first_frame: 7 }, ViewStart { view: 5, first_frame: 9 }];
        member.lead(views[0]).unwrap();
        member.lead(views[1]).unwrap();
        member.set_complete(false).unwrap();
        drop(member);
        let member = open();
        assert_eq!((member.member(), member.is_complete()), (&id[..], false));
        assert_eq!(member.views(), views);
        drop(member);
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        let directory = Arc::new(Directory::lock(folder.path()).unwrap());
        let error = Membership::open(directory).unwrap_err();
        assert!(error.to_string().contains("member.json"), "{error}");
    }
}
