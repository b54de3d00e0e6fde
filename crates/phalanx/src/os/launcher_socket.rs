//! The socket on which a rank tells its launcher things: datagrams to an abstract name.
//!
//! Datagrams of one rank arrive in order and are never lost: what a rank sent before it ended is there before the launcher
//! notices its end.

#[cfg(target_os = "linux")]
pub(crate) use linux::LauncherSocket;
#[cfg(not(target_os = "linux"))]
pub(crate) use portable::LauncherSocket;

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    use std::time::Duration;

    /// Longest wait for a launcher that reads nothing: it may be stopped.
    const SEND_TIMEOUT: Duration = Duration::from_secs(1);

    pub(crate) struct LauncherSocket(UnixDatagram);

    impl LauncherSocket {
        /// Connects to the launcher's socket. Only the launcher can then send to this one.
        pub fn connect(name: &str) -> io::Result<LauncherSocket> {
            let own = format!("phalanx-rank-{:016x}", getrandom::u64().map_err(io::Error::other)?);
            let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(own)?)?;
            socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?;
            socket.set_write_timeout(Some(SEND_TIMEOUT))?;
            Ok(LauncherSocket(socket))
        }

        pub fn send(&self, message: &[u8]) -> io::Result<()> {
            self.0.send(message).map(drop)
        }

        /// Waits for the launcher's next message. It is short.
        pub fn recv(&self) -> io::Result<String> {
            let mut message = [0; 32];
            let len = self.0.recv(&mut message)?;
            Ok(String::from_utf8_lossy(&message[..len]).into_owned())
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod portable {
    use std::io;

    /// No launcher starts ranks here: this type has no values.
    pub(crate) enum LauncherSocket {}

    impl LauncherSocket {
        pub fn connect(_name: &str) -> io::Result<LauncherSocket> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub fn send(&self, _message: &[u8]) -> io::Result<()> {
            match *self {}
        }

        pub fn recv(&self) -> io::Result<String> {
            match *self {}
        }
    }
}
