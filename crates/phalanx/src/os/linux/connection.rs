//! Abstract Unix sockets between processes of one host: they carry bytes and file descriptors, and name the
//! user at the other end.

use super::{Process, SharedFile, timespec};
use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Writes to a socket without raising SIGPIPE, which would end a program that is not Rust's.
pub(crate) fn write_socket(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(stream, bytes, SendFlags::NOSIGNAL)?)
}

/// The address of a rendezvous: an abstract Unix socket, which has no place in the file system and
/// ends with its last descriptor.
pub(crate) struct Address(String);

impl Address {
    pub fn new(name: &str) -> io::Result<Address> {
        SocketAddr::from_abstract_name(name).map(|_| Address(name.to_owned()))
    }

    pub fn listen(&self) -> io::Result<Listener> {
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&self.0)?).map(Listener)
    }

    /// Connects, without waiting: [`WouldBlock`](io::ErrorKind::WouldBlock) while the listener has as many connections as it
    /// queues, and accepts none.
    pub fn connect(&self) -> io::Result<LocalConnection> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(self.0.as_bytes())?)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        Ok(LocalConnection(stream))
    }
}

/// The process at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerProcess {
    pub user: u32,
    /// `None` if it has no id in this process's PID namespace.
    pub process: Option<u32>,
}

pub(crate) struct Listener(UnixListener);

impl Listener {
    /// The next connection, or `None` if none came within `timeout`.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<LocalConnection>> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timespec(timeout))) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(None),
            Ok(_) => self.0.accept().map(|(stream, _)| Some(LocalConnection(stream))),
            Err(e) => Err(e.into()),
        }
    }
}

/// A connection that carries bytes and file descriptors between processes of one host.
pub(crate) struct LocalConnection(UnixStream);

/// The most file descriptors one message carries (the kernel's `SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// Pause between retries while too many descriptors are in flight.
const TICK: Duration = Duration::from_millis(1);

impl LocalConnection {
    /// The process at the other end, as the kernel knows it.
    pub fn peer(&self) -> io::Result<PeerProcess> {
        // rustix takes a peer of another PID namespace, which has the id 0, for an error.
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the option's value is a `ucred`, and the length is that of the variable.
        let status = unsafe {
            let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
            libc::getsockopt(self.0.as_raw_fd(), level, option, (&raw mut peer).cast(), &raw mut len)
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(PeerProcess { user: peer.uid, process: u32::try_from(peer.pid).ok().filter(|pid| *pid != 0) })
    }

    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        self.0.set_read_timeout(timeout)?;
        self.0.set_write_timeout(timeout)
    }

    /// Sends all of `bytes`.
    pub fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match write_socket(&self.0, bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Receives exactly `bytes.len()` bytes.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<()> {
        use std::io::Read;
        (&self.0).read_exact(bytes)
    }

    /// Sends the peer handles to a region's file and to processes.
    pub fn send_handles(
        &self,
        file: Option<&SharedFile>,
        processes: &[&Process],
        deadline: Instant,
    ) -> io::Result<()> {
        let fds: Vec<BorrowedFd<'_>> = file
            .map(|f| f.0.as_fd())
            .into_iter()
            .chain(processes.iter().map(|process| process.fd.as_fd()))
            .collect();
        // A message carries at most `SCM_MAX_FD` descriptors.
        for fds in fds.chunks(MAX_FDS) {
            loop {
                match self.send_fds(fds) {
                    // Descriptors in flight count against the user's `ulimit -n`.
                    Err(Errno::TOOMANYREFS) if Instant::now() < deadline => std::thread::sleep(TICK),
                    sent => break sent?,
                }
            }
        }
        Ok(())
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = vec![MaybeUninit::uninit(); SendAncillaryMessage::ScmRights(fds).size()];
        retry_on_intr(|| {
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            rustix::net::sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).map(drop)
        })
    }

    /// Receives a peer's handles, sent with [`send_handles`](Self::send_handles).
    pub fn receive_process(&self) -> io::Result<Process> {
        self.receive_fds(1).map(|mut fds| Process::from(fds.remove(0)))
    }

    /// A region's file and the processes of all its ranks.
    pub fn receive_world(&self, ranks: usize) -> io::Result<(SharedFile, Vec<Process>)> {
        let mut fds = self.receive_fds(1 + ranks)?.into_iter();
        let file = SharedFile(fds.next().expect("as many as asked for"));
        Ok((file, fds.map(Process::from).collect()))
    }

    fn receive_fds(&self, count: usize) -> io::Result<Vec<OwnedFd>> {
        let mut received = Vec::with_capacity(count);
        while received.len() < count {
            let expected = (count - received.len()).min(MAX_FDS);
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let message = retry_on_intr(|| {
                let buffers = &mut [IoSliceMut::new(&mut byte)];
                rustix::net::recvmsg(&self.0, buffers, &mut control, RecvFlags::CMSG_CLOEXEC)
            })?;
            let before = received.len();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    received.extend(fds);
                }
            }
            if message.bytes == 0 || received.len() - before != expected {
                let got = received.len() - before;
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{got} of {expected} file descriptors came: raise `ulimit -n`"),
                ));
            }
        }
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, Uid};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_broken_connection_is_an_error_and_no_signal() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let caught = Arc::new(AtomicBool::new(false));
        let handler = signal_hook::flag::register(signal_hook::consts::SIGPIPE, caught.clone()).unwrap();
        let error = LocalConnection(ours).send(&[0; 100]).unwrap_err();
        signal_hook::low_level::unregister(handler);
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert!(!caught.load(Ordering::Relaxed));
    }

    /// On a thread of its own: its user, if it is root, becomes one to whom limits apply.
    #[test]
    fn handles_wait_for_those_under_way() {
        let soft = rustix::process::getrlimit(Resource::Nofile);
        let limit = soft.current.map_or(1024, |limit| limit.min(1024));
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..soft }).unwrap();
        let (ours, theirs) =
            UnixStream::pair().map(|(a, b)| (LocalConnection(a), LocalConnection(b))).unwrap();
        let own = Process::current().unwrap();
        let sender = std::thread::spawn(move || {
            if rustix::process::getuid().is_root() {
                let nobody = Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            let handles = [&own; MAX_FDS];
            let past = Instant::now();
            let mut under_way = 0;
            let error = loop {
                match ours.send_handles(None, &handles, past) {
                    Ok(()) => under_way += 1,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.raw_os_error(), Some(Errno::TOOMANYREFS.raw_os_error()));
            let reader = std::thread::spawn(move || {
                (0..=under_way).for_each(|_| drop(theirs.receive_fds(MAX_FDS).unwrap()));
            });
            ours.send_handles(None, &handles, past + Duration::from_secs(60)).unwrap();
            reader.join().unwrap();
        });
        sender.join().unwrap();
    }
}
