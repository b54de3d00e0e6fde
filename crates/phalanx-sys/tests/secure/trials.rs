//! The trials. This program is started again, with the variables of a caller that would like to choose what is loaded, and says
//! in which of that caller's folders it would look.

use libtest_mimic::{Arguments, Failed, Trial};
use phalanx_sys::{FileSearch, Search, is_secure};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Set in the program that is started again.
const ACT: &str = "SECURE_ACT";
const NOBODY: u32 = 65534;

const SEARCH: Search = Search {
    name: "the library",
    files: &["libchosen-by-the-caller.so"],
    variable: "SECURE_TEST_LIB",
    homes: &["SECURE_TEST_HOME"],
    wheels: &["chosen/lib"],
    global: false,
};

const FILES: FileSearch = FileSearch {
    name: "the header",
    file: "chosen-by-the-caller.h",
    variable: "SECURE_TEST_INCLUDE",
    homes: &["SECURE_TEST_HOME"],
    below: &["include"],
    wheels: &["chosen/include"],
    system: &[],
};

pub fn main() -> ExitCode {
    if std::env::var_os(ACT).is_some() {
        say();
        return ExitCode::SUCCESS;
    }
    let programs = Programs::new();
    let works = is_root() && Caller::new().run(true, &[]).is_ok_and(|said| said.starts_with("secure"));
    let reason = "needs root, and a temporary folder whose setuid bits count";
    let setuid = |name: &str, variables: &'static [&'static str]| {
        let trial = Trial::test(name, move || nothing_is_taken(variables));
        if works { trial } else { trial.with_ignored_flag(true).with_kind(reason) }
    };
    let trials = vec![
        Trial::test("an_ordinary_program_takes_what_its_user_chooses", ordinary),
        Trial::test("relative_folders_never_count", relative),
        setuid(
            "a_setuid_program_takes_no_file_that_a_variable_names",
            &["SECURE_TEST_LIB", "SECURE_TEST_INCLUDE"],
        ),
        setuid("a_setuid_program_takes_no_home", &["SECURE_TEST_HOME"]),
        setuid("a_setuid_program_takes_no_python_environment", &["VIRTUAL_ENV"]),
        setuid("a_setuid_program_takes_no_folder_of_path", &["PATH"]),
        setuid("a_setuid_program_takes_nothing_of_the_home_folder", &["HOME"]),
    ];
    let code = libtest_mimic::run(&Arguments::from_args(), trials).exit_code();
    drop(programs);
    code
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

/// Says whether this is secure execution, and which files it would take.
fn say() {
    println!("{}", if is_secure() { "secure" } else { "ordinary" });
    for place in SEARCH.places() {
        if place.file.is_absolute() || place.file.components().count() > 1 {
            println!("{}", place.file.display());
        }
    }
    match FILES.find(&[]) {
        Ok(found) => println!("{}", found.folder.join(FILES.file).display()),
        Err(error) => println!("not found: {error}"),
    }
    println!("error: {}", SEARCH.open().expect_err("it is no library"));
}

/// This program twice, once setuid. Copied before the trials: one that starts a process at the same time would keep the copy open for
/// writing.
struct Programs;

impl Programs {
    fn new() -> Programs {
        std::fs::create_dir_all(Programs::folder()).expect("a folder");
        for (setuid, mode) in [(true, 0o4755), (false, 0o755)] {
            let program = Programs::path(setuid);
            std::fs::copy(std::env::current_exe().expect("a path of its own"), &program).expect("a copy");
            std::fs::set_permissions(&program, PermissionsExt::from_mode(mode)).expect("its mode");
        }
        Programs
    }

    fn folder() -> PathBuf {
        std::env::temp_dir().join(format!("phalanx-secure-{}", std::process::id()))
    }

    fn path(setuid: bool) -> PathBuf {
        Programs::folder().join(if setuid { "setuid" } else { "ordinary" })
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Programs::folder());
    }
}

/// A caller with a folder of its own that has a library and a header wherever a search could look.
struct Caller {
    folder: PathBuf,
}

impl Caller {
    fn new() -> Caller {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("phalanx-secure-{}-{number}", std::process::id()));
        let (library, header) = (SEARCH.files[0], FILES.file);
        for file in [
            format!("lib/{library}"),
            format!("include/{header}"),
            format!("lib/python3.11/site-packages/chosen/lib/{library}"),
            format!("lib/python3.11/site-packages/chosen/include/{header}"),
            format!(".local/lib/python3.11/site-packages/chosen/lib/{library}"),
            "bin/python3".to_owned(),
        ] {
            let file = folder.join(file);
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            std::fs::write(file, "chosen").expect("a file");
        }
        Caller { folder }
    }

    /// The variables of this caller with these names.
    fn variables(&self, names: &[&str]) -> Vec<(String, PathBuf)> {
        let value = |name: &str| match name {
            "SECURE_TEST_LIB" => self.folder.join("lib"),
            "SECURE_TEST_INCLUDE" => self.folder.join("include"),
            "PATH" => self.folder.join("bin"),
            _ => self.folder.clone(),
        };
        names.iter().map(|name| ((*name).to_owned(), value(name))).collect()
    }

    /// Runs this program as another user, `setuid` or not; answers what it says.
    fn run(&self, setuid: bool, variables: &[(String, PathBuf)]) -> Result<String, Failed> {
        let mut command = Command::new(Programs::path(setuid));
        command.env_clear().env(ACT, "1").envs(variables.iter().map(|(name, value)| (name, value)));
        command.current_dir(&self.folder);
        if setuid {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command.output()?;
        if !output.status.success() {
            return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The lines that name a file of the caller.
    fn taken<'a>(&self, said: &'a str) -> Vec<&'a str> {
        let is_taken = |line: &&str| Path::new(line).starts_with(&self.folder);
        said.lines().filter(is_taken).collect()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn nothing_is_taken(names: &[&str]) -> Result<(), Failed> {
    let caller = Caller::new();
    let said = caller.run(true, &caller.variables(names))?;
    if !said.starts_with("secure") || !caller.taken(&said).is_empty() {
        return Err(said.into());
    }
    // The user is told why the choice does not count.
    if names.contains(&SEARCH.variable) && !said.contains("setuid") {
        return Err(said.into());
    }
    Ok(())
}

fn ordinary() -> Result<(), Failed> {
    for name in ["SECURE_TEST_LIB", "SECURE_TEST_INCLUDE", "SECURE_TEST_HOME", "VIRTUAL_ENV", "PATH", "HOME"]
    {
        let caller = Caller::new();
        let said = caller.run(false, &caller.variables(&[name]))?;
        if !said.starts_with("ordinary") || caller.taken(&said).is_empty() {
            return Err(format!("{name}: {said}").into());
        }
    }
    Ok(())
}

fn relative() -> Result<(), Failed> {
    for (name, value) in [
        ("VIRTUAL_ENV", "."),
        ("CONDA_PREFIX", "."),
        ("PATH", "bin"),
        ("PATH", "./bin"),
        ("HOME", "."),
        ("SECURE_TEST_HOME", "."),
    ] {
        let caller = Caller::new();
        let said = caller.run(false, &[(name.to_owned(), PathBuf::from(value))])?;
        let named =
            said.lines().filter(|line| !line.starts_with("error:") && !line.starts_with("not found:"));
        if let Some(line) = named.into_iter().find(|line| line.contains("chosen")) {
            return Err(format!("{name}={value}: {line}").into());
        }
    }
    Ok(())
}
