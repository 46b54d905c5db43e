"""Makes `import cuflash` work in the folder that holds a clone named cuflash: the package is one folder further in.

Python finds this folder there before an installed cuflash. Without this file it would be a namespace package, with
nothing in it. Under another name, which pytest may give it, it is an empty module. It is not installed.
"""


def _become_the_package_inside() -> None:
    """This very module becomes the package: others may be waiting for it, and pickles name it."""
    import os
    import sys
    from importlib.machinery import SourceFileLoader

    module = sys.modules[__name__]
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cuflash")
    file = os.path.join(folder, "__init__.py")
    module.__file__, module.__path__ = file, [folder]
    module.__loader__ = module.__spec__.loader = SourceFileLoader(__name__, file)
    module.__spec__.origin, module.__spec__.submodule_search_locations = file, module.__path__
    module.__spec__.cached = None  # Python finds out where the bytecode of the new file lies
    module.__loader__.exec_module(module)


if __name__ == "cuflash":
    _become_the_package_inside()
