//! The job's token: the secret by which the members of a job know each other.

use crate::os::{PrivateError, read_private};
use crate::types::error::{Error, Result};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Most bytes of a token file.
const LONGEST_FILE: usize = 4096;

/// The secret that authenticates the members of a job to their store.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl Token {
    /// Shortest token, in bytes. It must be long: somebody who records a session can try tokens offline.
    pub const MIN_LEN: usize = 16;

    /// Creates a token from 256 random bits.
    pub fn random() -> std::io::Result<Token> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        // Text, since tokens are passed in environment variables and files.
        Ok(Token(hex(&bytes).into_bytes()))
    }

    /// Makes a token from text, without the white space around it. `None` if it has fewer than
    /// [`MIN_LEN`](Token::MIN_LEN) bytes.
    pub fn new(text: &str) -> Option<Token> {
        let text = text.trim();
        (text.len() >= Token::MIN_LEN).then(|| Token(text.as_bytes().to_vec()))
    }

    /// Reads the token from a regular file of this user that nobody else can read or write.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if it is no such file, cannot be read, or the token is too short.
    pub fn from_file(path: &str) -> Result<Token> {
        let problem = |problem: String| {
            let remedy = "a token file has one line, a secret of at least 16 characters, and mode 600; it belongs to the user who starts the ranks";
            Error::bootstrap(problem, remedy)
        };
        let text = read_private(path.as_ref(), LONGEST_FILE).map_err(|error| match error {
            PrivateError::Unreadable(e) => problem(format!("the token file {path} cannot be read: {e}")),
            PrivateError::Irregular => problem(format!("the token file {path} is no regular file")),
            PrivateError::Foreign { owner, own } => {
                problem(format!("the token file {path} belongs to user {owner}, and this is user {own}"))
            }
            PrivateError::Open { mode } => {
                problem(format!("others may read or write the token file {path} (mode {mode:o})"))
            }
            PrivateError::Long => problem(format!("the token file {path} is too long for a token")),
        })?;
        let text =
            String::from_utf8(text).map_err(|_| problem(format!("the token file {path} is no text")))?;
        Token::new(&text).ok_or_else(|| problem(format!("the token in the file {path} is too short")))
    }

    /// A text that only who has the token can derive from `text`.
    pub(crate) fn derive(&self, text: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(text.as_bytes());
        hex(&mac.finalize().into_bytes())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the token as text, to pass it to the ranks of the job.
    pub fn reveal(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a token is made of text")
    }
}

/// Bytes as text, two hexadecimal digits each.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Never prints the token itself.
impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const TOKEN: &str = "a token that is long enough";

    #[test]
    fn tokens_have_a_least_length_and_are_not_shown() {
        assert!(Token::new("  short  ").is_none());
        assert_eq!(Token::new(&format!(" {TOKEN}\n")).unwrap().reveal(), TOKEN);
        let random = Token::random().unwrap();
        assert_ne!(random, Token::random().unwrap());
        assert!(!format!("{random:?}").contains(random.reveal()));
    }

    #[test]
    fn what_is_derived_depends_on_the_token_and_the_text() {
        let [one, other] = [TOKEN, "another token, also long"].map(|text| Token::new(text).unwrap());
        let derived = one.derive("job");
        assert_eq!((derived.len(), &derived), (64, &one.derive("job")));
        assert!(derived != one.derive("job 2") && derived != other.derive("job"));
    }

    #[cfg(unix)]
    #[test]
    fn a_token_file_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("phalanx-token-{}", std::process::id()));
        let name = path.to_str().unwrap();
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Token::from_file(name)
        };
        assert_eq!(write("0123456789abcdef\n", 0o600).unwrap().reveal(), "0123456789abcdef");
        for mode in [0o640, 0o604, 0o620] {
            assert!(write("0123456789abcdef\n", mode).unwrap_err().to_string().contains("others may read"));
        }
        assert!(write("short\n", 0o600).unwrap_err().to_string().contains("too short"));
        std::fs::remove_file(&path).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_token_file_is_a_regular_file_of_a_token() {
        use std::os::unix::fs::{OpenOptionsExt, symlink};
        let folder = std::env::temp_dir().join(format!("phalanx-tokens-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let read = |name: &str| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let path = path(name);
            std::thread::spawn(move || {
                sender.send(Token::from_file(&path).map_err(|error| error.to_string()))
            });
            receiver.recv_timeout(Duration::from_secs(10)).expect("it does not wait")
        };
        let write = |name: &str, text: &str| {
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.write(true).create(true).mode(0o600).open(path(name)).unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        };
        assert!(std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        for (name, says) in
            [("fifo", "no regular file"), (".", "no regular file"), ("none", "cannot be read")]
        {
            let error = read(name).unwrap_err();
            assert!(error.contains(says), "{name}: {error}");
        }
        write("token", "0123456789abcdef");
        symlink(path("token"), path("link")).unwrap();
        assert_eq!(read("link").unwrap().reveal(), "0123456789abcdef", "the owner's own link");
        write("long", &"x".repeat(5000));
        assert!(read("long").unwrap_err().contains("too long"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
