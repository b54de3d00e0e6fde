//! The processes of a test, with their output.

use super::common::TIMEOUT;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A process with its collected output. Dropping kills it.
pub struct Node {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Node {
    pub fn start(mut command: Command) -> Node {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it can be started");
        let said = Arc::new(Mutex::new(String::new()));
        let collect = |stream: Box<dyn Read + Send>| {
            let said = said.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let mut said = said.lock().unwrap();
                    said.push_str(&line);
                    said.push('\n');
                }
            });
        };
        collect(Box::new(child.stdout.take().unwrap()));
        collect(Box::new(child.stderr.take().unwrap()));
        Node { child, said }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Waits until the process has printed a text. Returns the time that took.
    pub fn wait_for(&self, what: &str) -> Result<Duration, String> {
        let started = Instant::now();
        while !self.said().contains(what) {
            if started.elapsed() > TIMEOUT {
                return Err(format!("it never said {what:?}, but:\n{}", self.said()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(started.elapsed())
    }

    /// Waits for the end of the process. Returns its status and output.
    pub fn end(mut self) -> Result<(Option<i32>, String), String> {
        let started = Instant::now();
        let status: ExitStatus = loop {
            match self.child.try_wait().map_err(|e| e.to_string())? {
                Some(status) => break status,
                None if started.elapsed() > TIMEOUT => {
                    return Err(format!("it does not end; it said:\n{}", self.said()));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        // The last lines may not have arrived yet.
        std::thread::sleep(Duration::from_millis(100));
        Ok((status.code(), self.said()))
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
