//! What the system refuses, and files that somebody else has prepared.

use super::common::{Said, children_of, eventually, forget_settings, launch, phalanx, say};
use libtest_mimic::{Failed, Trial};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

/// A user without processes.
const NOBODY: u32 = 65534;

pub fn trials() -> Vec<Trial> {
    let is_root = rustix::process::geteuid().is_root();
    let noexec = in_new_mount("true", Path::new("/"));
    let cgroup = Cgroup::new("probe").is_some();
    vec![
        Trial::test("refusals::too_few_processes_are_an_error_that_names_the_limit", too_few_processes)
            // Root may have any number.
            .with_ignored_flag(!is_root),
        Trial::test("refusals::perf_names_the_limit_too", perf_names_the_limit).with_ignored_flag(!is_root),
        Trial::test("refusals::doctor_names_the_limit_too", doctor_names_the_limit)
            .with_ignored_flag(!is_root),
        Trial::test("refusals::a_full_cgroup_is_named", a_full_cgroup).with_ignored_flag(!cgroup),
        Trial::test("refusals::log_files_do_not_follow_links", log_files_do_not_follow_links),
        Trial::test("refusals::log_files_may_be_in_a_folder_that_is_the_users_link", own_link),
        Trial::test("refusals::a_log_folder_that_is_another_users_link_is_refused", another_users_link)
            .with_ignored_flag(!is_root),
        Trial::test("refusals::a_program_that_cannot_start_has_its_own_reason", cannot_start),
        Trial::test("refusals::a_program_on_a_noexec_mount_is_told_so", on_noexec)
            .with_ignored_flag(say(noexec).code != Some(0)),
    ]
}

fn require(is_true: bool, said: &Said) -> Result<(), Failed> {
    let all = || format!("exit status {:?}\nstdout:\n{}stderr:\n{}", said.code, said.stdout, said.stderr);
    if is_true { Ok(()) } else { Err(all().into()) }
}

/// This command as a user who may have so many processes and threads.
fn limited(command: &Command, most: usize) -> Command {
    let mut limited = Command::new("setpriv");
    limited.args([&format!("--reuid={NOBODY}"), "--clear-groups", "prlimit", &format!("--nproc={most}")]);
    limited.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null()).current_dir("/");
    forget_settings(&mut limited);
    limited.env("PHALANX_BACKEND", "host");
    limited
}

fn too_few_processes() -> Result<(), Failed> {
    let mut refused = 0;
    for most in 1..=24 {
        let said = say(limited(&phalanx("launch -n 3 -- true"), most));
        require(!said.stderr.contains("panicked"), &said)?;
        if said.code == Some(0) {
            continue;
        }
        refused += 1;
        require(said.code == Some(1), &said)?;
        require(said.stderr.contains(&format!("{most} processes and threads: raise `ulimit -u`")), &said)?;
    }
    if refused == 0 { Err("nothing was refused".into()) } else { Ok(()) }
}

fn perf_names_the_limit() -> Result<(), Failed> {
    for most in [4, 8, 11] {
        let said = say(limited(&phalanx("perf all_reduce -p 4 -e 8 -n 1"), most));
        require(!said.stderr.contains("panicked"), &said)?;
        require(said.code == Some(1) && said.stderr.contains("`ulimit -u`"), &said)?;
    }
    Ok(())
}

fn doctor_names_the_limit() -> Result<(), Failed> {
    for most in 1..=8 {
        let said = say(limited(&phalanx("doctor"), most));
        require(!said.stderr.contains("panicked") && !said.stdout.contains("panicked"), &said)?;
        require(said.code == Some(1) && said.stdout.contains("`ulimit -u`"), &said)?;
    }
    Ok(())
}

/// A group of processes with a limit; removed when it is dropped.
struct Cgroup(std::path::PathBuf);

impl Cgroup {
    fn new(name: &str) -> Option<Cgroup> {
        let root = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"]
            .map(Path::new)
            .into_iter()
            .find(|root| root.exists())?;
        let folder = root.join(format!("phalanx-test-{name}-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let cgroup = Cgroup(folder);
        fs::write(cgroup.0.join("pids.max"), "8").ok()?;
        Some(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        eventually("no process is left", || fs::remove_dir(&self.0).is_ok());
    }
}

fn a_full_cgroup() -> Result<(), Failed> {
    let cgroup = Cgroup::new("full").ok_or("no cgroup can be made")?;
    let inner = phalanx("launch -n 3 -- sleep 1000");
    let mut command = Command::new("sh");
    command.args(["-c", &format!("echo $$ > {}/cgroup.procs; exec \"$@\"", cgroup.0.display()), "sh"]);
    command.arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
    let said = say(command);
    require(said.code == Some(1) && !said.stderr.contains("panicked"), &said)?;
    require(said.stderr.contains("8 processes and threads: raise its pids.max"), &said)
}

fn log_files_do_not_follow_links() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    fs::write(at("symbolic"), "precious")?;
    fs::write(at("hard"), "precious")?;
    symlink(at("symbolic"), at("rank-0.out"))?;
    fs::hard_link(at("hard"), at("rank-0.err"))?;
    rustix::fs::mkfifoat(rustix::fs::CWD, at("rank-1.out"), rustix::fs::Mode::RWXU)?;
    fs::write(at("rank-1.err"), "an earlier log, which is longer")?;
    let script = "echo out $PHALANX_RANK; echo err $PHALANX_RANK >&2";
    let mut launcher = launch(&format!("-n 2 --log-dir {}", folder.path().display()), script);
    let mut launcher = launcher.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let started = std::time::Instant::now();
    while launcher.try_wait()?.is_none() {
        if started.elapsed() > std::time::Duration::from_secs(20) {
            children_of(launcher.id())
                .into_iter()
                .for_each(|pid| super::common::signal(pid, rustix::process::Signal::KILL));
            launcher.kill()?;
            launcher.wait()?;
            return Err("the launcher hangs".into());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    for (name, expected) in [
        ("symbolic", "precious"),
        ("hard", "precious"),
        ("rank-0.out", "out 0\n"),
        ("rank-0.err", "err 0\n"),
        ("rank-1.out", "out 1\n"),
        ("rank-1.err", "err 1\n"),
    ] {
        let found = fs::read_to_string(at(name))?;
        if found != expected {
            return Err(format!("{name} is {found:?}").into());
        }
    }
    let mode = fs::metadata(at("rank-0.out"))?.permissions().mode() & 0o777;
    if mode == 0o600 { Ok(()) } else { Err(format!("mode {mode:o}").into()) }
}

fn own_link() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    fs::create_dir(folder.path().join("logs"))?;
    symlink(folder.path().join("logs"), folder.path().join("link"))?;
    let said = say(launch(&format!("-n 1 --log-dir {}", folder.path().join("link").display()), "echo out"));
    require(said.code == Some(0), &said)?;
    require(fs::read_to_string(folder.path().join("logs/rank-0.out"))? == "out\n", &said)
}

fn another_users_link() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let link = folder.path().join("link");
    fs::create_dir(folder.path().join("logs"))?;
    symlink(folder.path().join("logs"), &link)?;
    lchown(&link, Some(NOBODY), None)?;
    let said = say(launch(&format!("-n 1 --log-dir {}", link.display()), "echo out"));
    require(said.code == Some(1) && said.stderr.contains("is a link of another user"), &said)?;
    require(fs::read_dir(folder.path().join("logs"))?.next().is_none(), &said)
}

fn cannot_start() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let script = |name: &str, text: &str, mode: u32| {
        let path = folder.path().join(name);
        fs::write(&path, text)?;
        File::open(&path)?.set_permissions(Permissions::from_mode(mode))?;
        Ok::<_, std::io::Error>(path.display().to_string())
    };
    let cases = [
        ("/etc".to_owned(), 126, "it is a folder"),
        (script("plain", "text", 0o644)?, 126, "it is not executable (chmod +x?)"),
        (
            script("script", "#!/nowhere/python3 -u\n", 0o755)?,
            127,
            "its interpreter /nowhere/python3 is not there",
        ),
        (script("folder-interpreter", "#!/etc\n", 0o755)?, 126, "its interpreter /etc may not be run"),
        ("/nowhere/program".to_owned(), 127, "there is no such file"),
    ];
    for (program, code, reason) in cases {
        let said = say(phalanx(&format!("launch -n 2 -- {program}")));
        require(
            said.code == Some(code) && said.stderr.contains(&format!("cannot start {program}: {reason}")),
            &said,
        )?;
    }
    Ok(())
}

/// A script in name spaces where a file system without execution is mounted at a folder.
fn in_new_mount(script: &str, folder: &Path) -> Command {
    let mut command = Command::new("unshare");
    let script = format!("mount -t tmpfs -o noexec none {} && {script}", folder.display());
    command.args(["-rm", "sh", "-c", &script]).stdin(Stdio::null());
    forget_settings(&mut command);
    command
}

fn on_noexec() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("program").display().to_string();
    let inner = phalanx(&format!("launch -n 2 -- {program}"));
    let words = std::iter::once(inner.get_program()).chain(inner.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let said = say(in_new_mount(&format!("cp /bin/true {program} && {}", words.join(" ")), folder.path()));
    require(said.code == Some(126) && said.stderr.contains("(mounted noexec)"), &said)
}
