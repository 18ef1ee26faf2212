//! A label of a pod that says that its master leads, so that a Service can select the leader.

use std::{sync::Arc, time::Duration};

use mooncake_base::{
    Clock, Error, Result, SystemClock,
    sync::{Condvar, Mutex},
};
use mooncake_os::threads::Threads;
use serde_json::json;

use super::api::{ApiServer, check_name};

/// Name and value of the label, which are upstream's.
const LABEL: &str = "mooncake.io/store-role";
const LEADER: &str = "leader";

/// Time limit of a call. The end of the process waits for as long.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause after a call that failed.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The longest wait for a change, after which the thread looks for itself.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Keeps the label of a pod as it should be: a thread writes it, and repeats what failed. A label that
/// an earlier process of the pod has left is removed at the start.
#[derive(Debug)]
pub struct LeaderLabel {
    shared: Arc<PodState>,
    threads: Threads,
}

#[derive(Debug)]
struct PodState {
    api: ApiServer,
    pod: String,
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

/// What the label should be.
#[derive(Debug, Clone, Copy, Default)]
struct Wanted {
    is_leader: bool,
    is_closed: bool,
}

impl LeaderLabel {
    /// Begins to keep the label of a pod in the namespace of the API server.
    ///
    /// # Errors
    /// The name is not one of a pod, or the thread cannot be started.
    pub fn start(api: ApiServer, pod: &str) -> Result<Self> {
        check_name(pod)?;
        let (pod, wanted) = (pod.to_owned(), Mutex::default());
        let shared = Arc::new(PodState { api, pod, wanted, changed: Condvar::new() });
        let inner = Arc::clone(&shared);
        let threads = Threads::new(1);
        threads.spawn("mc-pod-label", move || inner.run()).map_err(|source| {
            Error::internal("the thread of the pod's label cannot be started").caused_by(source)
        })?;
        Ok(Self { shared, threads })
    }

    /// Says whether the pod should have the label. Does not wait.
    pub fn set(&self, is_leader: bool) {
        let mut wanted = self.shared.wanted.lock();
        wanted.is_leader = is_leader && !wanted.is_closed;
        drop(wanted);
        self.shared.changed.notify_all();
    }

    /// Removes the label, and ends. Waits for two calls at most.
    pub fn close(&self) {
        self.threads.stop(|| {
            *self.shared.wanted.lock() = Wanted { is_leader: false, is_closed: true };
            self.shared.changed.notify_all();
        });
    }
}

impl Drop for LeaderLabel {
    fn drop(&mut self) {
        self.close();
    }
}

impl PodState {
    fn run(&self) {
        // Not known yet: an earlier process may have left the label.
        let mut present = None;
        let mut failure = String::new();
        let mut wanted = self.wanted.lock();
        loop {
            if present == Some(wanted.is_leader) {
                if wanted.is_closed {
                    return;
                }
                self.changed.wait_for(&mut wanted, WAIT_MAX);
                continue;
            }
            let Wanted { is_leader, is_closed } = *wanted;
            drop(wanted);
            let written = self.write(is_leader);
            wanted = self.wanted.lock();
            match written {
                Ok(()) => {
                    present = Some(is_leader);
                    failure.clear();
                    tracing::info!(pod = self.pod, is_leader, "the pod's label {LABEL}");
                }
                Err(error) => {
                    let text = error.to_string();
                    if failure != text {
                        tracing::warn!(%error, pod = self.pod, is_leader, "the pod's label {LABEL} is not written");
                    }
                    failure = text;
                    // The server may have carried the call out.
                    present = None;
                    if is_closed {
                        return;
                    }
                    if !wanted.is_closed {
                        self.changed.wait_for(&mut wanted, RETRY_PAUSE);
                    }
                }
            }
        }
    }

    fn write(&self, is_leader: bool) -> Result<()> {
        let value = if is_leader { json!(LEADER) } else { json!(null) };
        let patch = json!({ "metadata": { "labels": { LABEL: value } } });
        self.api.patch_pod(&self.pod, &patch, SystemClock.now() + CALL_TIMEOUT)
    }
}
