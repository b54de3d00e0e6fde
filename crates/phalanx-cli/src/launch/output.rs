//! The ranks' output: passed on line by line with the rank in front, left alone, or swallowed.
//!
//! Bytes are kept as they are: a rank's output need not be UTF-8.

use super::log_files::LogFile;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What happens to the output of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Every line is passed on with `[rank] ` in front.
    Prefixed,
    /// Every line is passed on as it is.
    Plain,
    /// The ranks write to the launcher's own output; a terminal stays a terminal.
    Inherited,
    /// Nothing is passed on; the last lines of standard error are kept for the report.
    Swallowed,
}

impl Output {
    /// A rank's standard output and error.
    pub fn stdio(self) -> Stdio {
        match self {
            Output::Inherited => Stdio::inherit(),
            Output::Prefixed | Output::Plain | Output::Swallowed => Stdio::piped(),
        }
    }

    /// The text in front of every line that is passed on; `None` if no line is.
    fn prefix(self, rank: usize) -> Option<String> {
        match self {
            Output::Prefixed => Some(format!("[{rank}] ")),
            Output::Plain => Some(String::new()),
            Output::Inherited | Output::Swallowed => None,
        }
    }
}

/// After the end of a rank, its streams are given up when they were silent for this long: its descendants may
/// hold them open for ever.
pub const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Lines that the report of a failure shows.
const TAIL_LINES: usize = 10;
/// Bytes of each of these lines.
const TAIL_WIDTH: usize = 400;
/// A longer line, in bytes, is passed on in parts.
const MAX_LINE: u64 = 1 << 20;

/// The last lines of a stream.
#[derive(Debug, Clone, Default)]
pub struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: &[u8]) {
        let shown = &line[..line.len().min(TAIL_WIDTH)];
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(shown).into_owned());
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// A thread that passes one of a rank's streams on.
pub struct Reader {
    thread: JoinHandle<()>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// When the thread began to wait for the stream. `None` while it passes output on, which may block, too.
    waiting: Mutex<Option<Instant>>,
    /// Why output could not be passed on.
    error: Mutex<Option<io::Error>>,
}

impl Reader {
    fn start(run: impl FnOnce(&Arc<State>) -> io::Result<()> + Send + 'static) -> Reader {
        let state = Arc::new(State::default());
        let of_thread = state.clone();
        let thread = std::thread::spawn(move || *lock(&of_thread.error) = run(&of_thread).err());
        Reader { thread, state }
    }

    /// Whether the stream of a rank that ended at this time is complete, or given up.
    pub fn is_done(&self, ended: Instant) -> bool {
        let is_idle = |since: Instant| since.max(ended).elapsed() >= LAST_OUTPUT;
        self.thread.is_finished() || lock(&self.state.waiting).is_some_and(is_idle)
    }

    /// Why output could not be passed on. A closed pipe is no error: its reader wanted no more.
    pub fn take_error(&self) -> Option<io::Error> {
        lock(&self.state.error).take_if(|error| error.kind() != io::ErrorKind::BrokenPipe)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream that records when a read begins to wait.
struct TimedRead<R> {
    stream: R,
    state: Arc<State>,
}

impl<R: Read> Read for TimedRead<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        *lock(&self.state.waiting) = Some(Instant::now());
        let read = self.stream.read(buffer);
        *lock(&self.state.waiting) = None;
        read
    }
}

/// Starts a thread that passes a rank's standard output on.
pub fn pass_stdout(
    output: Output,
    rank: usize,
    stream: impl Read + Send + 'static,
    log: Option<LogFile>,
) -> Reader {
    Reader::start(move |state| {
        let stream = TimedRead { stream, state: state.clone() };
        match output.prefix(rank) {
            Some(prefix) => pass_on(stream, &prefix, None, log, |line| write_line(io::stdout().lock(), line)),
            None => pass_on(stream, "", None, log, |_| Ok(())),
        }
    })
}

/// Starts a thread that passes a rank's standard error on and keeps its last lines.
pub fn pass_stderr(
    output: Output,
    rank: usize,
    stream: impl Read + Send + 'static,
    log: Option<LogFile>,
    tail: Tail,
) -> Reader {
    Reader::start(move |state| {
        let stream = TimedRead { stream, state: state.clone() };
        match output.prefix(rank) {
            Some(prefix) => {
                pass_on(stream, &prefix, Some(&tail), log, |line| write_line(io::stderr().lock(), line))
            }
            None => pass_on(stream, "", Some(&tail), log, |_| Ok(())),
        }
    })
}

fn write_line(mut to: impl Write, line: &[u8]) -> io::Result<()> {
    // One call under the stream's lock: lines of different ranks never mix.
    to.write_all(line)?;
    to.flush()
}

/// Reads lines to the end of the stream, and calls `write` for each, with `prefix` in front.
///
/// After a failed `write` only the log goes on. Without a log, or if the output's reader closed its pipe,
/// this returns: the rank's stream is closed with it, and the rank gets a broken pipe in its turn.
fn pass_on(
    stream: impl Read,
    prefix: &str,
    tail: Option<&Tail>,
    mut log: Option<LogFile>,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    let mut written = Ok(());
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        match stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return written,
            Ok(_) => {}
        }
        if let Some(log) = &mut log {
            log.write(&line[prefix.len()..]);
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        if let Some(tail) = tail {
            tail.push(&line[prefix.len()..line.len() - 1]);
        }
        if written.is_ok() {
            written = write(&line);
        }
        let is_closed = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
        if written.as_ref().is_err_and(|e| log.is_none() || is_closed(e)) {
            return written;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(input: &[u8]) -> (Vec<u8>, Vec<String>) {
        let tail = Tail::default();
        let mut written = Vec::new();
        pass_on(input, "[3] ", Some(&tail), None, |line| {
            written.extend_from_slice(line);
            Ok(())
        })
        .unwrap();
        (written, tail.lines())
    }

    #[test]
    fn every_line_gets_its_rank() {
        let (written, tail) = passed(b"one\n\nthree");
        assert_eq!(written, b"[3] one\n[3] \n[3] three\n");
        assert_eq!(tail, ["one", "", "three"]);
    }

    #[test]
    fn bytes_are_kept() {
        let (written, _) = passed(b"\xff\x00\r\n");
        assert_eq!(written, b"[3] \xff\x00\r\n");
    }

    #[test]
    fn the_tail_is_bounded() {
        let long = [b'x'; 5000];
        let text: Vec<u8> = (0..100).flat_map(|_| [&long[..], b"\n"].concat()).collect();
        let (_, tail) = passed(&text);
        assert_eq!(tail.len(), TAIL_LINES);
        assert!(tail.iter().all(|line| line.len() == TAIL_WIDTH));
    }

    #[test]
    fn a_line_without_end_is_not_kept_for_ever() {
        let endless = vec![b'x'; MAX_LINE as usize + 5];
        let (written, _) = passed(&endless);
        assert_eq!(written.iter().filter(|&&byte| byte == b'\n').count(), 2);
    }

    #[test]
    fn reading_stops_when_nobody_listens() {
        let mut lines = 0;
        let passed = pass_on(&b"1\n2\n3\n"[..], "", None, None, |_| {
            lines += 1;
            Err(io::ErrorKind::BrokenPipe.into())
        });
        assert_eq!((lines, passed.unwrap_err().kind()), (1, io::ErrorKind::BrokenPipe));
    }

    #[test]
    fn a_log_is_written_although_the_output_cannot_be() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = LogFile::new(std::fs::File::create(&path).unwrap());
        let passed =
            pass_on(&b"1\n2\n"[..], "[0] ", None, Some(log), |_| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(passed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(path).unwrap(), b"1\n2\n");
    }
}
