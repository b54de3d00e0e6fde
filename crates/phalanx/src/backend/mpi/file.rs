//! MPI-IO: files that all ranks read and write by MPI's collective calls, which gather and scatter short pieces as the file system likes it.

use super::MpiComm;
use crate::contract::{Call, FileAccess, Operation, SharedFile, SharedFiles};
use crate::control::record::CallRecord;
use crate::types::error::Result;
use phalanx_sys::mpi::{Constants, FileFunctions, Functions, Handle, Status};
use std::ffi::{CString, c_int};
use std::io;
use std::ops::Range;
use std::path::Path;

struct MpiFile<'a> {
    comm: &'a MpiComm,
    f: &'a FileFunctions,
    handle: Handle,
}

impl SharedFiles for MpiComm {
    fn open(&self, path: &Path, access: FileAccess) -> Result<io::Result<Box<dyn SharedFile + '_>>> {
        self.ready()?;
        let path = CString::new(path.as_os_str().as_encoded_bytes()).expect("the system has opened it");
        let f = self.process.mpi.file_functions.as_ref().expect("`files` answers none without them");
        let constants = &self.process.mpi.constants;
        let mode = match access {
            FileAccess::Read => constants.mode_rdonly,
            // To write short pieces, MPI reads what is between them.
            FileAccess::Write => constants.mode_rdwr,
        };
        self.watch.next();
        let mut handle = Handle::ZERO;
        // SAFETY: the communicator is alive, and the path ends with NUL; the variable takes the new handle.
        let opened = self.file_call("MPI_File_open", || unsafe {
            (f.open)(self.comm, path.as_ptr(), mode, constants.info_null, &raw mut handle)
        });
        Ok(opened.map(|()| Box::new(MpiFile { comm: self, f, handle }) as Box<dyn SharedFile>))
    }
}

impl MpiComm {
    /// A call of MPI-IO, with the deadline. Its error is the file's: files answer errors, unlike communicators.
    fn file_call(&self, function: &str, call: impl FnOnce() -> c_int) -> io::Result<()> {
        let _watched = self.watch.enter(&CallRecord::of(&Call::empty(Operation::File)));
        match call() {
            0 => Ok(()),
            code => {
                let text = self.process.mpi.functions.describe(code);
                Err(io::Error::other(format!("{function}: {text}")))
            }
        }
    }
}

/// An MPI type: bytes at these places, counted from the file's beginning.
struct Places<'a> {
    f: &'a Functions,
    datatype: Handle,
}

impl<'a> Places<'a> {
    fn new(f: &'a Functions, constants: &Constants, places: &[Range<u64>]) -> Places<'a> {
        let lengths: Vec<c_int> = places.iter().map(|place| (place.end - place.start) as c_int).collect();
        let starts: Vec<isize> = places.iter().map(|place| place.start as isize).collect();
        let (count, mut datatype) = (places.len() as c_int, Handle::ZERO);
        // SAFETY: MPI is initialised, and both lists have so many numbers; the variable takes the new handle. MPI answers errors of types by
        // ending the job: these calls only run out of memory.
        unsafe {
            let (lengths, starts) = (lengths.as_ptr(), starts.as_ptr());
            (f.type_create_hindexed)(count, lengths, starts, constants.byte, &raw mut datatype);
            (f.type_commit)(&raw mut datatype);
        }
        Places { f, datatype }
    }
}

impl Drop for Places<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made by `new`; a file keeps what it needs of it.
        unsafe { (self.f.type_free)(&raw mut self.datatype) };
    }
}

impl MpiFile<'_> {
    /// Makes these places all that the file seems to have, and moves so many bytes by `call`. Collective.
    fn at(
        &self,
        places: &[Range<u64>],
        len: usize,
        function: &'static str,
        call: impl FnOnce(Handle, c_int, *mut Status) -> c_int,
    ) -> io::Result<()> {
        let mpi = &self.comm.process.mpi;
        let (f, byte) = (&mpi.functions, mpi.constants.byte);
        let own = (!places.is_empty()).then(|| Places::new(f, &mpi.constants, places));
        let datatype = own.as_ref().map_or(byte, |own| own.datatype);
        // SAFETY: the file is open, the type is committed, and the name ends with NUL.
        let viewed = self.comm.file_call("MPI_File_set_view", || unsafe {
            (self.f.set_view)(self.handle, 0, byte, datatype, c"native".as_ptr(), mpi.constants.info_null)
        });
        // The others are in this call, also if this rank has no view.
        let (count, mut status) = (if viewed.is_ok() { len as c_int } else { 0 }, Status::new());
        let moved = self.comm.file_call(function, || call(byte, count, &raw mut status));
        viewed.and(moved)?;
        let mut done = 0;
        // SAFETY: MPI has filled the status.
        unsafe { (f.get_count)(&raw const status, byte, &raw mut done) };
        match done == count {
            true => Ok(()),
            false => Err(io::Error::other(format!("{function}: {done} of {count} bytes"))),
        }
    }
}

impl SharedFile for MpiFile<'_> {
    fn write(&self, places: &[Range<u64>], bytes: &[u8]) -> io::Result<()> {
        self.at(places, bytes.len(), "MPI_File_write_at_all", |byte, count, status| {
            // SAFETY: the file is open, and the buffer has at least so many bytes.
            unsafe { (self.f.write_at_all)(self.handle, 0, bytes.as_ptr().cast(), count, byte, status) }
        })
    }

    fn read(&self, places: &[Range<u64>], bytes: &mut [u8]) -> io::Result<()> {
        self.at(places, bytes.len(), "MPI_File_read_at_all", |byte, count, status| {
            // SAFETY: as in `write`.
            unsafe { (self.f.read_at_all)(self.handle, 0, bytes.as_mut_ptr().cast(), count, byte, status) }
        })
    }

    fn close(mut self: Box<Self>) -> io::Result<()> {
        let (f, handle) = (self.f, &raw mut self.handle);
        // SAFETY: the file is open, and nobody uses the handle afterwards.
        self.comm.file_call("MPI_File_close", || unsafe { (f.close)(handle) })
    }
}
