//! What the ranks print: passed on line by line with the rank in front, or left alone, or swallowed.
//!
//! Bytes are kept as they are: a rank's output need not be UTF-8.

use super::report::remedy;
use crate::log::say;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
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
    /// What a rank is started with as standard output and error.
    pub fn stdio(self) -> Stdio {
        match self {
            Output::Inherited => Stdio::inherit(),
            Output::Prefixed | Output::Plain | Output::Swallowed => Stdio::piped(),
        }
    }

    /// What stands before every line that is passed on; `None` if none is.
    fn prefix(self, rank: usize) -> Option<String> {
        match self {
            Output::Prefixed => Some(format!("[{rank}] ")),
            Output::Plain => Some(String::new()),
            Output::Inherited | Output::Swallowed => None,
        }
    }
}

/// For how long nothing may come from a rank that has ended, until its stream is given up: its own descendants may
/// hold it open for ever.
pub const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// How many of a rank's last lines the report of its failure shows.
const TAIL_LINES: usize = 10;
/// How many bytes of each of them.
const TAIL_WIDTH: usize = 400;
/// A line that is still without end after so many bytes is passed on as it is.
const LONGEST_LINE: u64 = 1 << 20;

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

/// The files that a rank's output is written to: `rank-3.out` and `rank-3.err`, after a restart
/// `rank-3.restart-1.out`.
pub struct LogFiles {
    pub out: File,
    pub err: File,
    pub err_path: PathBuf,
}

impl LogFiles {
    pub fn create(dir: &Path, rank: usize, restart: u32) -> io::Result<LogFiles> {
        let name = match restart {
            0 => format!("rank-{rank}"),
            restart => format!("rank-{rank}.restart-{restart}"),
        };
        let create = |ending: &str| {
            let path = dir.join(format!("{name}.{ending}"));
            let explain = |e: io::Error| {
                let (path, remedy) = (path.display(), remedy(&e));
                io::Error::new(e.kind(), format!("the log file {path} cannot be written: {e}{remedy}"))
            };
            Ok::<_, io::Error>((File::create(&path).map_err(explain)?, path))
        };
        let ((out, _), (err, err_path)) = (create("out")?, create("err")?);
        Ok(LogFiles { out, err, err_path })
    }
}

/// A thread that passes one of a rank's streams on.
pub struct Reader {
    thread: JoinHandle<()>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Since when the thread has been waiting for the stream: not while it waits for whoever reads its own output.
    waiting: Mutex<Option<Instant>>,
    /// Why it could not pass something on.
    error: Mutex<Option<io::Error>>,
}

impl Reader {
    fn start(run: impl FnOnce(&Arc<State>) -> io::Result<()> + Send + 'static) -> Reader {
        let state = Arc::new(State::default());
        let of_thread = state.clone();
        let thread = std::thread::spawn(move || *lock(&of_thread.error) = run(&of_thread).err());
        Reader { thread, state }
    }

    /// Whether nothing more is to come from a rank that ended at this time.
    pub fn is_done(&self, ended: Instant) -> bool {
        let is_idle = |since: Instant| since.max(ended).elapsed() >= LAST_OUTPUT;
        self.thread.is_finished() || lock(&self.state.waiting).is_some_and(is_idle)
    }

    /// Why it could not pass something on, unless nobody wanted it any more.
    pub fn take_error(&self) -> Option<io::Error> {
        lock(&self.state.error).take_if(|error| error.kind() != io::ErrorKind::BrokenPipe)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream that notes when it is waited for.
struct Watched<R> {
    stream: R,
    state: Arc<State>,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        *lock(&self.state.waiting) = Some(Instant::now());
        let read = self.stream.read(buffer);
        *lock(&self.state.waiting) = None;
        read
    }
}

/// Passes a rank's standard output on, in a thread of its own.
pub fn pass_stdout(
    output: Output,
    rank: usize,
    stream: impl Read + Send + 'static,
    log: Option<File>,
) -> Reader {
    let log = log.map(Log::new);
    Reader::start(move |state| {
        let stream = Watched { stream, state: state.clone() };
        match output.prefix(rank) {
            Some(prefix) => pass_on(stream, &prefix, None, log, |line| write_line(io::stdout().lock(), line)),
            None => pass_on(stream, "", None, log, |_| Ok(())),
        }
    })
}

/// Passes a rank's standard error on, in a thread of its own, and keeps its last lines.
pub fn pass_stderr(
    output: Output,
    rank: usize,
    stream: impl Read + Send + 'static,
    log: Option<File>,
    tail: Tail,
) -> Reader {
    let log = log.map(Log::new);
    Reader::start(move |state| {
        let stream = Watched { stream, state: state.clone() };
        match output.prefix(rank) {
            Some(prefix) => {
                pass_on(stream, &prefix, Some(&tail), log, |line| write_line(io::stderr().lock(), line))
            }
            None => pass_on(stream, "", Some(&tail), log, |_| Ok(())),
        }
    })
}

/// A log file. When it cannot be written any more it is given up, and the ranks go on.
struct Log(Option<File>);

impl Log {
    fn new(file: File) -> Log {
        Log(Some(file))
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.0
            && let Err(e) = file.write_all(bytes)
        {
            say(format_args!("phalanx launch: a log file cannot be written any more: {e}"));
            self.0 = None;
        }
    }
}

fn write_line(mut to: impl Write, line: &[u8]) -> io::Result<()> {
    // One call with the lock held: lines of different ranks never mix.
    to.write_all(line)?;
    to.flush()
}

/// Reads lines to the end of the stream, and hands each to `write` with `prefix` in front.
///
/// It ends early when `write` fails: the stream is closed, so that the rank, too, learns that nobody
/// reads any more. A log is written on, unless whoever read the lines did not want more of them.
fn pass_on(
    stream: impl Read,
    prefix: &str,
    tail: Option<&Tail>,
    mut log: Option<Log>,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    let mut written = Ok(());
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        match stream.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line) {
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
        let endless = vec![b'x'; LONGEST_LINE as usize + 5];
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
        let log = Log::new(File::create(&path).unwrap());
        let passed =
            pass_on(&b"1\n2\n"[..], "[0] ", None, Some(log), |_| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(passed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(path).unwrap(), b"1\n2\n");
    }
}
