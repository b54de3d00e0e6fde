//! `--metrics`: what is served while the ranks run, and after one was lost.

use super::common::{TIMEOUT, eventually, say};
use super::rank::launch;
use libtest_mimic::{Failed, Trial};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("metrics::counters_of_all_ranks_are_served", all_ranks),
        Trial::test("metrics::a_lost_rank_is_gone_and_the_failure_is_counted", lost_rank),
        Trial::test("metrics::an_address_of_another_machine_is_refused", refused),
    ]
}

/// A job that serves metrics, and where. It is ended when this is dropped.
struct Job {
    launcher: Child,
    address: String,
}

impl Job {
    fn start(options: &str, recovery: &str, faults: &str, folder: &std::path::Path) -> Result<Job, Failed> {
        let options = format!("-n 2 --metrics 127.0.0.1:0 {options}");
        let mut command = launch(&options, recovery, faults, folder);
        let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(launcher.stderr.take().ok_or("a pipe")?).lines();
        let line = lines.next().ok_or("it says where")??;
        let address = line.strip_prefix("phalanx launch: metrics at http://").ok_or(line.clone())?;
        let address = address.strip_suffix("/metrics").ok_or(line.clone())?.to_owned();
        // Nobody waits for the rest, but the pipe must not fill.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Ok(Job { launcher, address })
    }

    fn get(&self, path: &str) -> Result<String, Failed> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// What is served, once it is as wanted.
    fn scrape_until(&self, is_wanted: impl Fn(&str) -> bool) -> String {
        let mut answer = String::new();
        eventually("what is wanted is served", || {
            answer = self.get("/metrics").unwrap_or_default();
            is_wanted(&answer)
        });
        answer
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// The value of the only series with this name, and with all of these labels.
fn value(text: &str, name: &str, labels: &[&str]) -> Result<f64, Failed> {
    let fits =
        |line: &&str| line.split('{').next() == Some(name) && labels.iter().all(|label| line.contains(label));
    let lines: Vec<&str> = text.lines().filter(fits).collect();
    let [line] = lines[..] else { return Err(format!("{name} {labels:?}: {lines:?} in:\n{text}").into()) };
    Ok(line.rsplit(' ').next().unwrap_or_default().parse()?)
}

/// Both ranks call nothing from the fortieth step on.
fn all_ranks() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let job = Job::start("", "fail", "compute@40:0,compute@40:1", folder.path())?;
    let of = |rank: usize| format!("rank=\"{rank}\",operation=\"all_reduce\"}} 40\n");
    let text = job.scrape_until(|text| [of(0), of(1)].iter().all(|line| text.contains(line)));
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    for rank in ["rank=\"0\"", "rank=\"1\""] {
        assert_eq!(value(&text, "phalanx_up", &[rank])?, 1.0);
        let labels = [rank, "backend=\"host\"", "operation=\"all_reduce\""];
        assert_eq!(value(&text, "phalanx_operations_total", &labels)?, 40.0);
        assert_eq!(value(&text, "phalanx_bytes_total", &labels)?, 40.0 * 8.0);
        assert_eq!(value(&text, "phalanx_failures_total", &labels)?, 0.0);
        assert_eq!(value(&text, "phalanx_operation_seconds_count", &labels)?, 40.0);
        let seconds = value(&text, "phalanx_operation_seconds_sum", &labels)?;
        assert!((0.0..60.0).contains(&seconds), "{seconds}");
        let least = [labels[0], labels[1], labels[2], "le=\"1e-6\""];
        let bucket = value(&text, "phalanx_operation_seconds_bucket", &least)?;
        assert!((0.0..=40.0).contains(&bucket), "{bucket}");
        let of_broadcast = [rank, "operation=\"broadcast\""];
        assert_eq!(value(&text, "phalanx_operations_total", &of_broadcast)?, 1.0);
    }
    assert!(job.get("/")?.starts_with("HTTP/1.1 404 "));
    Ok(())
}

/// Rank 1 is killed at the thirtieth step, and rank 0 calls nothing from the fortieth on.
fn lost_rank() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let job = Job::start("--keep-going", "shrink", "kill@30:1,compute@40:0", folder.path())?;
    let has_failed = |line: &str| {
        line.starts_with("phalanx_failures_total") && line.contains("\"all_reduce\"") && line.ends_with(" 1")
    };
    let text = job.scrape_until(|text| text.lines().any(has_failed) && !text.contains("rank=\"1\""));
    assert_eq!(value(&text, "phalanx_up", &["rank=\"0\""])?, 1.0);
    Ok(())
}

fn refused() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    // An address for documentation, which no machine has.
    let said = say(launch("-n 2 --metrics 192.0.2.1:9400", "fail", "", folder.path()));
    assert_ne!(said.code, Some(0));
    assert!(said.stderr.contains("--metrics 192.0.2.1:9400: cannot listen there"), "{}", said.stderr);
    Ok(())
}
