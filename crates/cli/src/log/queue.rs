//! A bounded queue of log lines before a stream that may block, and the thread that writes them.
//! Who logs never waits: lines that find the queue full are counted and left out.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, SystemClock};
use mooncake_os::threads;
use tracing_subscriber::fmt::MakeWriter;

/// The maximum number of lines that wait.
const LINES_MAX: usize = 4096;
/// The maximum length of a line; longer ones are cut.
const LINE_BYTES_MAX: usize = 16 << 10;

/// The writing end of the queue. Clones write to the same one.
#[derive(Debug, Clone)]
pub(super) struct LogQueue {
    lines: SyncSender<Vec<u8>>,
    progress: Arc<Progress>,
}

/// What became of the lines.
#[derive(Debug, Default)]
struct Progress {
    /// Lines that found the queue full, since the last one that was reported.
    dropped: AtomicU64,
    queued: AtomicU64,
    written: Mutex<u64>,
    wrote: Condvar,
}

impl LogQueue {
    /// Starts the thread that writes lines to `stream`.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(super) fn start(stream: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, queue) = sync_channel(LINES_MAX);
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        // The thread lives as long as the program: the last lines are written by `flush`.
        threads::start_detached("mc-log", move || shared.run(&queue, stream))?;
        Ok(Self { lines, progress })
    }

    /// Queues a line. Does not wait.
    pub(super) fn push(&self, mut line: Vec<u8>) {
        if line.len() > LINE_BYTES_MAX {
            line.truncate(LINE_BYTES_MAX);
            line.extend_from_slice(b" [cut]\n");
        }
        // Counted first, so that no flush misses a line that is in the queue.
        self.progress.queued.fetch_add(1, Ordering::SeqCst);
        if self.lines.try_send(line).is_err() {
            self.progress.queued.fetch_sub(1, Ordering::SeqCst);
            self.progress.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits until all lines queued so far are written, at most for `time`. Returns whether they
    /// are.
    pub(super) fn flush(&self, time: Duration) -> bool {
        let end = SystemClock.now() + time;
        let target = self.progress.queued.load(Ordering::SeqCst);
        let mut written = self.progress.written.lock();
        while *written < target {
            let left = end.left(SystemClock.now());
            if left.is_zero() {
                return false;
            }
            self.progress.wrote.wait_for(&mut written, left);
        }
        true
    }
}

impl Progress {
    fn run(&self, queue: &Receiver<Vec<u8>>, mut stream: impl Write) {
        while let Ok(line) = queue.recv() {
            // A closed stream is ignored; the program continues.
            let _ = stream.write_all(&line).and_then(|()| stream.flush());
            let dropped = self.dropped.swap(0, Ordering::SeqCst);
            if dropped > 0 {
                let note = format!(
                    "WARN {dropped} lines of the log were left out: standard error was not read \
                     fast enough\n"
                );
                let _ = stream.write_all(note.as_bytes()).and_then(|()| stream.flush());
            }
            *self.written.lock() += 1;
            self.wrote.notify_all();
        }
    }
}

/// A line that is being written: the subscriber writes it as a whole.
#[derive(Debug)]
pub(super) struct LineWriter<'a>(&'a LogQueue);

impl Write for LineWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        LineWriter(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(30);

    /// A stream that nobody reads until the gate opens.
    #[derive(Debug, Clone, Default)]
    struct Stream {
        is_open: Arc<(Mutex<bool>, Condvar)>,
        text: Arc<Mutex<Vec<u8>>>,
    }

    impl Stream {
        fn open(&self) {
            *self.is_open.0.lock() = true;
            self.is_open.1.notify_all();
        }

        fn text(&self) -> String {
            String::from_utf8(self.text.lock().clone()).unwrap()
        }
    }

    impl Write for Stream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut is_open = self.is_open.0.lock();
            while !*is_open {
                self.is_open.1.wait_for(&mut is_open, DEADLINE);
            }
            self.text.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_in_order_and_flushed() {
        let stream = Stream::default();
        stream.open();
        let queue = LogQueue::start(stream.clone()).unwrap();
        let lines: Vec<String> = (0..100).map(|number| format!("line {number}\n")).collect();
        for line in &lines {
            queue.make_writer().write_all(line.as_bytes()).unwrap();
        }
        assert!(queue.flush(DEADLINE));
        assert_eq!(stream.text(), lines.concat());
    }

    #[test]
    fn blocked_stream_delays_nobody_and_lost_lines_are_counted() {
        let stream = Stream::default();
        let queue = LogQueue::start(stream.clone()).unwrap();
        let surplus = 500;
        // One is taken by the thread, perhaps.
        for number in 0..=LINES_MAX + surplus {
            queue.push(format!("line {number}\n").into_bytes());
        }
        assert!(!queue.flush(Duration::from_millis(1)), "nothing is written");
        stream.open();
        assert!(queue.flush(DEADLINE));
        let text = stream.text();
        assert!(text.starts_with("line 0\n"));
        let note = text.lines().find(|line| line.starts_with("WARN ")).expect("a note");
        let dropped: usize = note.split(' ').nth(1).unwrap().parse().unwrap();
        assert!((surplus..=surplus + 1).contains(&dropped), "{note}");
        let lines = text.lines().filter(|line| line.starts_with("line ")).count();
        assert_eq!(lines + dropped, LINES_MAX + surplus + 1);
    }

    #[test]
    fn long_line_is_cut() {
        let stream = Stream::default();
        stream.open();
        let queue = LogQueue::start(stream.clone()).unwrap();
        queue.push(vec![b'x'; 1 << 20]);
        assert!(queue.flush(DEADLINE));
        assert!(stream.text().len() < 2 * LINE_BYTES_MAX && stream.text().ends_with(" [cut]\n"));
    }
}
