//! A client of a process manager, as in the library's PMI bootstrap: lines of PMI-1 on the descriptor in
//! `PMI_FD`, which Hydra (mpirun of MPICH and Intel MPI) and Slurm's PMI-1 serve.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Error, ErrorKind, Result, Write};
use std::os::fd::{BorrowedFd, RawFd};

/// A connection to the process manager. It lasts until the process ends.
pub struct ProcessManager {
    reader: BufReader<std::fs::File>,
    writer: std::fs::File,
    /// The name of the key-value space.
    names: String,
    pub rank: usize,
    pub ranks: usize,
}

/// The `name=value` pairs of an answer.
type Answer = BTreeMap<String, String>;

impl ProcessManager {
    /// The process manager that started this process, if one did.
    pub fn find() -> Result<Option<ProcessManager>> {
        std::env::var("PMI_FD").ok().map(|descriptor| ProcessManager::connect(&descriptor)).transpose()
    }

    fn connect(descriptor: &str) -> Result<ProcessManager> {
        let descriptor: RawFd = descriptor.parse().map_err(Error::other)?;
        let variable = |name: &str| {
            let value = std::env::var(name).map_err(Error::other)?;
            value.parse::<usize>().map_err(Error::other)
        };
        let (rank, ranks) = (variable("PMI_RANK")?, variable("PMI_SIZE")?);
        // SAFETY: inherited from the process manager, and never closed here.
        let socket = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let writer = std::fs::File::from(socket.try_clone_to_owned()?);
        let reader = BufReader::new(writer.try_clone()?);
        let mut manager = ProcessManager { reader, writer, names: String::new(), rank, ranks };
        manager.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let answer = manager.ask("get_my_kvsname", "my_kvsname")?;
        manager.names = word(&answer, "kvsname")?;
        Ok(manager)
    }

    /// Stores a value, which other ranks can get after a barrier.
    pub fn put(&mut self, key: &str, value: &str) -> Result<()> {
        let command = format!("put kvsname={} key={key} value={value}", self.names);
        self.ask(&command, "put_result").map(drop)
    }

    /// Waits for all ranks.
    pub fn barrier(&mut self) -> Result<()> {
        self.ask("barrier_in", "barrier_out").map(drop)
    }

    /// A value that a rank stored.
    pub fn get(&mut self, key: &str) -> Result<String> {
        let command = format!("get kvsname={} key={key}", self.names);
        let answer = self.ask(&command, "get_result")?;
        word(&answer, "value")
    }

    /// Ends the connection.
    pub fn leave(&mut self) -> Result<()> {
        self.ask("finalize", "finalize_ack").map(drop)
    }

    fn ask(&mut self, command: &str, expected: &str) -> Result<Answer> {
        // One write, so that the manager reads a whole line.
        self.writer.write_all(format!("cmd={command}\n").as_bytes())?;
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        let words = line.split_whitespace().filter_map(|word| word.split_once('='));
        let answer: Answer = words.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let is_expected = answer.get("cmd").is_some_and(|command| command == expected);
        let has_failed = answer.get("rc").is_some_and(|code| code != "0");
        if !is_expected || has_failed {
            return Err(Error::other(format!("the process manager answers {command:?} with {line:?}")));
        }
        Ok(answer)
    }
}

fn word(answer: &Answer, name: &str) -> Result<String> {
    answer.get(name).cloned().ok_or_else(|| Error::new(ErrorKind::InvalidData, format!("no {name}")))
}
