try{let e=localStorage.getItem("penstock-theme");e&&(document.documentElement.dataset.theme=e)}catch{}
