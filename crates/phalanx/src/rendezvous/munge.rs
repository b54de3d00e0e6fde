//! Secrets for processes of this user, also on other hosts: sealed and opened by MUNGE, which Slurm's hosts have.

use crate::os::user_id;
use crate::types::error::{Error, Result};
use std::io::{self, Write};
use std::process::{Command, Stdio};

/// The longest sealed secret that is read, in bytes.
pub(crate) const LONGEST: usize = 4096;

/// Whether MUNGE seals secrets here.
pub(crate) fn is_there() -> bool {
    seal("a trial").is_ok()
}

/// A credential with a secret that only processes of this user can open, once on each host, and for five minutes.
pub(crate) fn seal(secret: &str) -> Result<Vec<u8>> {
    let user = user_id().to_string();
    run("munge", &["--restrict-uid", &user], secret.as_bytes())
}

/// The secret in a credential that this user made.
pub(crate) fn open(credential: &[u8]) -> Result<String> {
    let opened = run("unmunge", &["--numeric", "--keys", "UID"], credential)?;
    let opened = String::from_utf8_lossy(&opened);
    let (metadata, secret) = opened.split_once("\n\n").unwrap_or_default();
    let maker = metadata.lines().find_map(|line| line.strip_prefix("UID:")?.trim().parse::<u32>().ok());
    if maker != Some(user_id()) {
        return Err(refused("unmunge", &format!("the credential is not of this user, but of {maker:?}")));
    }
    Ok(secret.to_owned())
}

/// What one of MUNGE's programs makes of an input.
fn run(program: &'static str, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
    // A program with more rights than its caller starts none that the caller's PATH names.
    let path = if phalanx_sys::is_secure() { format!("/usr/bin/{program}") } else { program.to_owned() };
    let done = || -> io::Result<_> {
        let mut command = Command::new(path);
        let streams = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = streams.args(arguments).spawn()?;
        // A program that ends early says why.
        let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input));
        child.wait_with_output()
    };
    let output = done().map_err(|error| refused(program, &error.to_string()))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(refused(program, String::from_utf8_lossy(&output.stderr).trim())),
    }
}

fn refused(program: &str, why: &str) -> Error {
    Error::bootstrap(
        format!("{program} does not help the ranks of this job to know each other: {why}"),
        "see that munged runs on all hosts, as Slurm needs it; or give the job a secret: export PHALANX_TOKEN=$(openssl rand -hex 32) \
         before srun",
    )
}
