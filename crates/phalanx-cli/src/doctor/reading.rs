//! Tries whether a process may read the memory of another one beside it, as ranks do with `process_vm_readv`.
//!
//! It takes two processes: a process may always read itself, and Yama lets it read its own children.

use crate::error::explain;
use anyhow::{Context, Result, bail, ensure};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};

/// What the reader must find.
const MARK: [u8; 8] = *b"phalanx!";

/// Lets one process read another. The error says what refused it.
pub fn between_processes() -> Result<(), String> {
    try_it().map_err(|error| explain(&error))
}

fn try_it() -> Result<()> {
    let mut lender = start("lender")?;
    let read = read_by_another(&mut lender);
    // It ends with its standard input.
    drop(lender.stdin.take());
    lender.wait()?;
    read
}

fn read_by_another(lender: &mut Child) -> Result<()> {
    let mut place = String::new();
    BufReader::new(lender.stdout.take().context("it has an output")?).read_line(&mut place)?;
    let mut reader = start("reader")?;
    reader.stdin.take().context("it has an input")?.write_all(place.as_bytes())?;
    let output = reader.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{}", said.trim());
    Ok(())
}

fn start(role: &str) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    Command::new(program)
        .args(["doctor", "--part", role])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(crate::launch::refused)
        .context("cannot start a process")
}

/// Says where the mark is, and stays until its standard input ends.
pub fn lend() -> Result<ExitCode> {
    let mark = std::hint::black_box(Box::new(MARK));
    println!("{} {}", std::process::id(), mark.as_ptr().addr());
    io::copy(&mut io::stdin(), &mut io::sink())?;
    drop(mark);
    Ok(ExitCode::SUCCESS)
}

/// Reads the mark of the process on standard input, and prints why it cannot.
pub fn read() -> Result<ExitCode> {
    let mut place = String::new();
    io::stdin().read_line(&mut place)?;
    match place.split_once(' ').map(|(pid, address)| (pid.parse(), address.trim().parse())) {
        Some((Ok(pid), Ok(address))) => match read_at(pid, address) {
            Ok(MARK) => return Ok(ExitCode::SUCCESS),
            Ok(other) => println!("it read {other:?}"),
            Err(error) => println!("{error}"),
        },
        _ => bail!("{place:?} is no place in memory"),
    }
    Ok(ExitCode::FAILURE)
}

fn read_at(pid: i32, address: usize) -> Result<[u8; 8]> {
    let mut bytes = [0; 8];
    let ours = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let theirs = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: bytes.len() };
    // SAFETY: `ours` is memory of this frame; the kernel checks the other process's address.
    let read = unsafe { libc::process_vm_readv(pid, &raw const ours, 1, &raw const theirs, 1, 0) };
    match usize::try_from(read) {
        Ok(read) => {
            ensure!(read == bytes.len(), "it read {read} of {} bytes", bytes.len());
            Ok(bytes)
        }
        Err(_) => Err(io::Error::last_os_error().into()),
    }
}
