//! What the ranks print: passed on line by line with the rank in front, or left alone, or swallowed.
//!
//! Bytes are kept as they are: a rank's output need not be UTF-8.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

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
                io::Error::new(e.kind(), format!("the log file {} cannot be written: {e}", path.display()))
            };
            Ok::<_, io::Error>((File::create(&path).map_err(explain)?, path))
        };
        let ((out, _), (err, err_path)) = (create("out")?, create("err")?);
        Ok(LogFiles { out, err, err_path })
    }
}

/// Passes a rank's standard output on, in a thread of its own.
pub fn pass_stdout(
    output: Output,
    rank: usize,
    stream: impl Read + Send + 'static,
    log: Option<File>,
) -> JoinHandle<()> {
    let log = log.map(Log::new);
    std::thread::spawn(move || match output.prefix(rank) {
        Some(prefix) => {
            pass_on(stream, &prefix, None, log, |line| write_line(io::stdout().lock(), line));
        }
        None => pass_on(stream, "", None, log, |_| Ok(())),
    })
}

/// Passes a rank's standard error on, in a thread of its own, and keeps its last lines.
pub fn pass_stderr(
    output: Output,
    rank: usize,
    stream: impl Read + Send + 'static,
    log: Option<File>,
    tail: Tail,
) -> JoinHandle<()> {
    let log = log.map(Log::new);
    std::thread::spawn(move || match output.prefix(rank) {
        Some(prefix) => {
            pass_on(stream, &prefix, Some(&tail), log, |line| write_line(io::stderr().lock(), line));
        }
        None => pass_on(stream, "", Some(&tail), log, |_| Ok(())),
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
            eprintln!("phalanx launch: a log file cannot be written any more: {e}");
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
/// reads any more.
fn pass_on(
    stream: impl Read,
    prefix: &str,
    tail: Option<&Tail>,
    mut log: Option<Log>,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        match stream.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
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
        if write(&line).is_err() {
            return;
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
        });
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
        pass_on(&b"1\n2\n3\n"[..], "", None, None, |_| {
            lines += 1;
            Err(io::ErrorKind::BrokenPipe.into())
        });
        assert_eq!(lines, 1);
    }
}
