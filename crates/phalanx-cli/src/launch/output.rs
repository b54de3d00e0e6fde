//! The ranks' output: passed on line by line with the rank in front, left alone, or swallowed.
//!
//! Bytes are kept as they are: a rank's output need not be UTF-8. A line without an end, such as a prompt, is passed on after
//! [`PATIENCE`].

use super::log_files::LogFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
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

    /// Writes a rank's output to a stream of the launcher; `None` if nothing is passed on.
    fn printer(self, rank: usize, to: LaunchersStream) -> Option<Printer> {
        match self {
            Output::Prefixed => Some(Printer { prefix: Some(format!("[{rank}] ")), rank, to }),
            Output::Plain => Some(Printer { prefix: None, rank, to }),
            Output::Inherited | Output::Swallowed => None,
        }
    }
}

/// After the end of a rank, its streams are given up when they were silent for this long: its descendants may
/// hold them open for ever.
pub const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// The longest time for which a line without an end is held back, in the hope of the rest.
const PATIENCE: Duration = Duration::from_millis(100);
/// A longer line, in bytes, is passed on in parts.
const MAX_LINE: usize = 1 << 20;
/// Bytes that are read at once.
const BUFFER: usize = 1 << 16;

/// Lines that the report of a failure shows.
const TAIL_LINES: usize = 10;
/// Bytes of each of these lines.
const TAIL_WIDTH: usize = 400;

/// The last lines of a stream.
#[derive(Debug, Clone, Default)]
pub struct Tail(Arc<Mutex<TailLines>>);

#[derive(Debug, Default)]
struct TailLines {
    complete: VecDeque<String>,
    /// The beginning of the line that has no end yet.
    open: Option<Vec<u8>>,
}

impl Tail {
    fn push(&self, bytes: &[u8]) {
        let mut lines = lock(&self.0);
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let open = lines.open.get_or_insert_default();
            open.extend_from_slice(&text[..text.len().min(TAIL_WIDTH - open.len())]);
            if part.ends_with(b"\n") {
                let line = lines.open.take().unwrap_or_default();
                if lines.complete.len() == TAIL_LINES {
                    lines.complete.pop_front();
                }
                lines.complete.push_back(String::from_utf8_lossy(&line).into_owned());
            }
        }
    }

    pub fn lines(&self) -> Vec<String> {
        let lines = lock(&self.0);
        let open = lines.open.iter().map(|line| String::from_utf8_lossy(line).into_owned());
        let all: Vec<String> = lines.complete.iter().cloned().chain(open).collect();
        all[all.len().saturating_sub(TAIL_LINES)..].to_vec()
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
    /// Starts a thread that passes a stream on.
    fn start(
        mut stream: impl Read + AsFd + Send + 'static,
        printer: Option<Printer>,
        log: Option<LogFile>,
        tail: Option<Tail>,
    ) -> io::Result<Reader> {
        let state = Arc::new(State::default());
        let of_thread = state.clone();
        let run = move || {
            let read = |buffer: &mut [u8], until: Option<Instant>| {
                *lock(&of_thread.waiting) = Some(Instant::now());
                let read = if is_ready(&stream, until)? { stream.read(buffer).map(Some) } else { Ok(None) };
                *lock(&of_thread.waiting) = None;
                read
            };
            let passed = pass_on(read, printer, tail, log);
            *lock(&of_thread.error) = passed.err();
        };
        let thread = std::thread::Builder::new().name("output".to_owned()).spawn(run)?;
        Ok(Reader { thread, state })
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

/// Waits until there is something to read. `false` when the time has passed.
fn is_ready(stream: &impl AsFd, until: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left
            .map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) });
        match poll(&mut [PollFd::new(stream, PollFlags::IN)], left.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// Starts a thread that passes a rank's standard output on.
pub fn pass_stdout(
    output: Output,
    rank: usize,
    stream: impl Read + AsFd + Send + 'static,
    log: Option<LogFile>,
) -> io::Result<Reader> {
    Reader::start(stream, output.printer(rank, LaunchersStream::Out), log, None)
}

/// Starts a thread that passes a rank's standard error on and keeps its last lines.
pub fn pass_stderr(
    output: Output,
    rank: usize,
    stream: impl Read + AsFd + Send + 'static,
    log: Option<LogFile>,
    tail: Tail,
) -> io::Result<Reader> {
    Reader::start(stream, output.printer(rank, LaunchersStream::Err), log, Some(tail))
}

/// One of the launcher's own streams, on which the output of all ranks comes together.
#[derive(Debug, Clone, Copy)]
enum LaunchersStream {
    Out,
    Err,
}

/// The ranks whose line without an end stands last on the launcher's output and error.
static OPEN_LINES: [Mutex<Option<usize>>; 2] = [Mutex::new(None), Mutex::new(None)];

impl LaunchersStream {
    fn open_line(self) -> &'static Mutex<Option<usize>> {
        &OPEN_LINES[self as usize]
    }

    /// One call under the stream's lock: lines of different ranks never mix.
    fn write(self, bytes: &[u8]) -> io::Result<()> {
        fn to(mut stream: impl Write, bytes: &[u8]) -> io::Result<()> {
            stream.write_all(bytes)?;
            stream.flush()
        }
        match self {
            LaunchersStream::Out => to(io::stdout().lock(), bytes),
            LaunchersStream::Err => to(io::stderr().lock(), bytes),
        }
    }
}

/// Writes a rank's output to a stream of the launcher.
struct Printer {
    /// The text in front of each line. Without one, bytes are left as they are.
    prefix: Option<String>,
    rank: usize,
    to: LaunchersStream,
}

impl Printer {
    /// Writes complete lines, or the beginning of one.
    fn print(&self, bytes: &[u8]) -> io::Result<()> {
        let Some(prefix) = &self.prefix else { return self.to.write(bytes) };
        let mut open_line = lock(self.to.open_line());
        let written = self.to.write(&prefixed(prefix, self.rank, bytes, &open_line));
        *open_line = (!bytes.ends_with(b"\n")).then_some(self.rank);
        written
    }

    /// Ends this rank's last line.
    fn finish(&self) -> io::Result<()> {
        let mut open_line = lock(self.to.open_line());
        match open_line.take_if(|rank| self.prefix.is_some() && *rank == self.rank) {
            Some(_) => self.to.write(b"\n"),
            None => Ok(()),
        }
    }
}

/// Output of a rank with the prefix in front of its lines, behind what stands on the stream already.
fn prefixed(prefix: &str, rank: usize, bytes: &[u8], open_line: &Option<usize>) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len() + prefix.len() + 1);
    if open_line.is_some_and(|open| open != rank) {
        text.push(b'\n');
    }
    let mut goes_on = *open_line == Some(rank);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        if !std::mem::take(&mut goes_on) {
            text.extend_from_slice(prefix.as_bytes());
        }
        text.extend_from_slice(line);
    }
    text
}

/// Passes a stream on to its end. `read` answers `None` if nothing came until a given time.
///
/// After output that cannot be written only the log goes on. Without a log, or if the output's reader closed its pipe,
/// this returns: the rank's stream is closed with it, and the rank gets a broken pipe in its turn.
fn pass_on(
    mut read: impl FnMut(&mut [u8], Option<Instant>) -> io::Result<Option<usize>>,
    printer: Option<Printer>,
    tail: Option<Tail>,
    mut log: Option<LogFile>,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    // A line without an end, and until when it waits for the rest.
    let (mut open, mut until): (Vec<u8>, Option<Instant>) = (Vec::new(), None);
    let mut written = Ok(());
    loop {
        let count = match read(&mut buffer, until) {
            Ok(count) => count,
            // As the end of the stream.
            Err(_) => Some(0),
        };
        let new = &buffer[..count.unwrap_or(0)];
        if let Some(log) = &mut log {
            log.write(new);
        }
        if let Some(tail) = &tail {
            tail.push(new);
        }
        open.extend_from_slice(new);
        let shown = match new.iter().rposition(|byte| *byte == b'\n') {
            // The rest of the line may come soon.
            Some(at) => open.len() - new.len() + at + 1,
            _ if new.is_empty() || open.len() >= MAX_LINE => open.len(),
            _ => 0,
        };
        if let Some(printer) = printer.as_ref().filter(|_| shown > 0 && written.is_ok()) {
            written = printer.print(&open[..shown]);
        }
        open.drain(..shown);
        until = match open.is_empty() {
            true => None,
            false => until.filter(|_| shown == 0).or_else(|| Some(Instant::now() + PATIENCE)),
        };
        let is_closed = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
        if written.as_ref().is_err_and(|e| log.is_none() || is_closed(e)) {
            return written;
        }
        if count == Some(0) {
            return written.and_then(|()| printer.map_or(Ok(()), |printer| printer.finish()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written of these pieces, which come one after the other; `None` is a pause.
    fn passed(pieces: &[Option<&[u8]>], tail: &Tail, log: Option<LogFile>) -> io::Result<()> {
        let mut pieces = pieces.iter();
        let read = |buffer: &mut [u8], _: Option<Instant>| {
            let Some(piece) = pieces.next() else { return Ok(Some(0)) };
            Ok(piece.map(|piece| {
                buffer[..piece.len()].copy_from_slice(piece);
                piece.len()
            }))
        };
        pass_on(read, None, Some(tail.clone()), log)
    }

    fn shown(bytes: &[u8], open_line: Option<usize>) -> String {
        String::from_utf8(prefixed("[3] ", 3, bytes, &open_line)).unwrap()
    }

    #[test]
    fn every_line_gets_its_rank() {
        assert_eq!(shown(b"one\n\nthree", None), "[3] one\n[3] \n[3] three");
    }

    #[test]
    fn a_line_that_goes_on_gets_no_second_rank() {
        assert_eq!(shown(b" 50 %\nnext\n", Some(3)), " 50 %\n[3] next\n");
    }

    #[test]
    fn a_line_begins_on_its_own_after_another_ranks_prompt() {
        assert_eq!(shown(b"line\n", Some(1)), "\n[3] line\n");
    }

    #[test]
    fn the_tail_is_bounded() {
        let tail = Tail::default();
        let long = [b'x'; 5000];
        for _ in 0..100 {
            tail.push(&long);
            tail.push(b"\n");
        }
        let lines = tail.lines();
        assert_eq!(lines.len(), TAIL_LINES);
        assert!(lines.iter().all(|line| line.len() == TAIL_WIDTH));
    }

    #[test]
    fn the_tail_has_the_line_without_an_end() {
        let tail = Tail::default();
        passed(&[Some(b"one\ntw"), None, Some(b"o")], &tail, None).unwrap();
        assert_eq!(tail.lines(), ["one", "two"]);
    }

    #[test]
    fn a_log_has_the_bytes_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let log = LogFile::create(&folder.path().join("log")).unwrap();
        passed(&[Some(b"1\n2"), None, Some(b"\xff\r\n3")], &Tail::default(), Some(log)).unwrap();
        assert_eq!(std::fs::read(folder.path().join("log")).unwrap(), b"1\n2\xff\r\n3");
    }
}
